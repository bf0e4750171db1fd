"""Bundles as a repository of the Hub: the folder's contents, its card, and loading from huggingface_hub's cache, offline."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import cgbundle
from cgbundle.format import file_names
from cgbundle.format.archive import Archive
from cgbundle.validate.bundle import check_bundle
from cgcompile import model_repository
from cgcompile.tools.model_repository import variant
from tests.helpers.bundles.tiny_bundle import manifest, write_bundle
from tests.helpers.places import GOLDEN, skip_older_torch
from tests.helpers.raising import raises

GPU, CPU = GOLDEN / "v1/traced_fixed.cgb", GOLDEN / "v1/cpu_fixed.cgb"
REVISION = "a" * 40


def cached(repository: Path, cache: Path) -> Path:
    """Returns the repository as huggingface_hub caches it: a snapshot of links to blobs that are named by their hash."""
    home = cache / "models--me--fixed"
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    snapshot = home / "snapshots" / REVISION
    for path in [path for path in sorted(repository.rglob("*")) if path.is_file()]:
        data, name = path.read_bytes(), path.relative_to(repository)
        digest = hashlib.sha256(data).hexdigest() if len(data) > 4096 else hashlib.sha1(data, usedforsecurity=False).hexdigest()
        blob, place = home / "blobs" / digest, snapshot / name
        blob.write_bytes(data)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(blob, place.parent))
    return snapshot


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return model_repository([GPU, CPU], tmp_path / "fixed", base_model="me/base", license="apache-2.0")


def test_each_machine_has_a_folder(repository: Path) -> None:
    names = sorted(path.name for path in (repository / "build").iterdir())
    assert names == ["cgbundle1-cpu-x86-64-v3-linux", "cgbundle1-cu120-sm_90-linux"]
    for name, golden in zip(names, (CPU, GPU), strict=True):
        opened = Archive(str(repository / "build" / name))
        check_bundle(opened, "full")
        assert opened.text == (golden / file_names.MANIFEST).read_bytes()
    assert sorted(path.name for path in repository.iterdir()) == ["README.md", "build"]


def test_the_card_is_one_that_the_hub_reads(repository: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="a package of transformers'")
    card = hub.ModelCard.load(repository / "README.md")
    metadata = card.data.to_dict()
    assert metadata["library_name"] == "cgbundle" and metadata["base_model"] == "me/base" and metadata["license"] == "apache-2.0"
    assert {"cgbundle", "sm_90"} <= set(metadata["tags"])
    assert "| input | x | float32 | ['batch', '8'] |" in card.content
    assert 'build/cgbundle1-cu120-sm_90-linux/*"' in card.content


def test_a_bundle_is_loaded_from_the_hubs_cache(repository: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="a package of transformers'")
    cached(repository, tmp_path / "cache")
    folder = Path(hub.snapshot_download("me/fixed", cache_dir=tmp_path / "cache", local_files_only=True)) / "build"
    for name in os.listdir(folder):
        assert (folder / name / file_names.WEIGHTS).is_symlink()
        check_bundle(Archive(str(folder / name)), "full")
    skip_older_torch()
    with cgbundle.load(folder / "cgbundle1-cpu-x86-64-v3-linux") as program:
        assert program.int_keys == cgbundle.load(CPU).int_keys


@pytest.mark.parametrize(
    "target",
    [
        "../../blobs/../secret", "../../blobs/" + "g" * 40, "../../blobs/" + "a" * 39, "blobs/" + "a" * 40, "/blobs/" + "a" * 40,
        "../x/../blobs/" + "a" * 40,
    ],
)  # fmt: skip
def test_other_links_are_refused(tmp_path: Path, target: str) -> None:
    bundle = write_bundle(tmp_path / "a" / "b" / "tiny.cgb")
    (tmp_path / "a" / "blobs").mkdir()
    (tmp_path / "secret").write_bytes(b"")
    (bundle / file_names.WEIGHTS).unlink()
    (bundle / file_names.WEIGHTS).symlink_to(target)
    with raises("file-damaged", "a symbolic link, which"):
        check_bundle(Archive(str(bundle)))


def test_a_blob_that_is_a_link_itself_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b" / "tiny.cgb")
    blob = tmp_path / "blobs" / ("a" * 40)
    blob.parent.mkdir()
    shutil.move(bundle / file_names.WEIGHTS, tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    (bundle / file_names.WEIGHTS).symlink_to(f"../../blobs/{blob.name}")
    with raises("file-damaged", "a symbolic link, which"):
        check_bundle(Archive(str(bundle)))


def test_what_cannot_be_one_repository_is_refused_and_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    with raises("output-exists", "fixed: exists"):
        model_repository([GPU], repository)
    with raises("output-exists", "are both for cgbundle1-cu120-sm_90-linux"):
        model_repository([GPU, shutil.copytree(GPU, tmp_path / "again.cgb")], tmp_path / "other")
    broken = Path(shutil.copytree(CPU, tmp_path / "broken.cgb"))
    (broken / file_names.WEIGHTS).write_bytes(b"")
    with raises("file-damaged"):
        model_repository([broken], tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "again.cgb", "broken.cgb"])


def test_names_of_variants() -> None:
    tiny = manifest()
    assert variant(tiny) == f"cgbundle1-cpu-{os.uname().machine}-linux"
    gpu = replace(tiny.target, kind="cuda", arch="sm_100", driver=12080)
    assert variant(replace(tiny, target=gpu)) == "cgbundle1-cu128-sm_100-linux"
