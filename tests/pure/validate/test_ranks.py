"""The bundles of other ranks are checked like that of rank 0 and compared with it. Errors name the rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.format import archive, file_names
from cgbundle.format.archive import Archive
from cgbundle.format.schema import File, Manifest
from cgbundle.validate.bundle import check_bundle, check_manifest, check_rank, check_ranks, examine
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as codec
from cgcompile.bundle.manifest_text import encode
from cgcompile.bundle.recordings import Recording
from tests.helpers.bundles import rank_bundles
from tests.helpers.bundles.cuda_bundles import KEYS, edge
from tests.helpers.bundles.edits import edited
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

IMAGE = next((GOLDEN / "v1/gpt_two.cgb/kernels").iterdir()).read_bytes()
RANK = "ranks/1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rank_bundles.write(tmp_path / "two.cgb", IMAGE)
    return tmp_path / "two.cgb"


def renamed(manifest: Manifest) -> Manifest:
    """Returns the manifest with an entry of another name."""
    files = [replace(file, path="programs/other.pt2") if file.path == file_names.PROGRAM else file for file in manifest.files]
    return replace(manifest, entries=(replace(manifest.entries[0], name="other"),), files=tuple(files))


def changed(path: Path, change: Callable[[Manifest], Manifest]) -> Archive:
    """Returns the bundle with another manifest of rank 1, which rank 0's manifest names."""
    (path / RANK / file_names.MANIFEST).write_bytes(encode(change(archive.read_manifest(str(path / RANK)))))
    whole = replace(archive.read_manifest(str(path)), files=manifest_text.describe_files(str(path)))
    (path / file_names.MANIFEST).write_bytes(encode(whole))
    return Archive(str(path))


def test_ranks_that_are_alike_hold(path: Path) -> None:
    bundle = changed(path, lambda base: base)
    assert [rank_archive.manifest.world.rank for rank_archive in check_ranks(bundle, "full")] == [1] and examine(bundle) == []


def test_damage_of_a_rank_is_named_with_its_folder(path: Path) -> None:
    (path / RANK / file_names.SELF_TEST).unlink()
    with raises("file-damaged", match=f"^{RANK}/: {file_names.SELF_TEST}: missing"):
        check_ranks(Archive(str(path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base: replace(base, world=replace(base.world, limit=base.world.limit + 8)), "world: .*, rank 0 has "),
        (lambda base: replace(base, target=replace(base.target, driver=13010)), "target: is not rank 0's"),
        (
            lambda base: edited(base, inputs=(replace(base.entries[0].inputs[0], name="z"),)),
            "inputs: of forward differ from rank 0's",
        ),
        (
            lambda base: edited(base, outputs=(replace(base.entries[0].outputs[0], name="z"),)),
            "outputs: of forward differ from rank 0's",
        ),
    ],
)
def test_a_rank_that_is_called_otherwise_is_refused(path: Path, change: Callable[[Manifest], Manifest], message: str) -> None:
    bundle = changed(path, change)
    with raises("manifest-invalid", match=f"^{RANK}/: {message}"):
        check_rank(bundle, 1)
    check_bundle(bundle)
    with raises("manifest-invalid", match=f"^{RANK}/: {message}"):
        check_bundle(bundle, "full")


def test_no_value_lies_in_the_memory_of_the_ranks(path: Path) -> None:
    manifest = archive.read_manifest(str(path))
    (first, *values), (program, *programs) = manifest.entries[0].programs[0].values, manifest.entries[0].programs
    moved = replace(program, values=(replace(first, memory="peer"), *values))
    with raises("manifest-invalid", match=r"^entries\[0\].programs\[0\].values\[0\].memory: a value in memory peer"):
        check_manifest(edited(manifest, programs=(moved, *programs)))


def test_a_rank_of_other_entries_is_refused(path: Path) -> None:
    (path / RANK / "programs").mkdir()
    (path / RANK / file_names.PROGRAM).rename(path / RANK / "programs/other.pt2")
    with raises("manifest-invalid", match=f"^{RANK}/: entries: are not rank 0's"):
        check_rank(changed(path, renamed), 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda graph: replace(graph, nodes=(*graph.nodes, graph.nodes[1]), edges=(*graph.edges, edge(1, 2))), (2, 1)),
        (lambda graph: replace(graph, nodes=(graph.nodes[0], replace(graph.nodes[1], grid=(99, 1, 1)))), (1, 0)),
        (lambda graph: replace(graph, nodes=graph.nodes[:1], edges=()), (0, 0)),
    ],
)
def test_a_rank_that_exchanges_other_data_is_refused(
    path: Path, change: Callable[[Recording], Recording], expected: tuple[int, int]
) -> None:
    """It would wait forever for the others, or they for it. `expected`: its number of exchanges, and the first different one."""
    image = hashlib.sha256(IMAGE).hexdigest()
    once = rank_bundles.recording(image, KEYS[0], rank_bundles.kernels(2, 1, IMAGE))
    name = f"graphs/g0-{KEYS[0]}.bin"
    data = codec.encode(change(once))
    (path / RANK / name).write_bytes(data)
    row = File(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def listed(manifest: Manifest) -> Manifest:
        return replace(manifest, files=tuple([row if file.path == name else file for file in manifest.files]))

    text = rf"^{RANK}/: int_key \({KEYS[0]},\): {expected[0]} exchanges, rank 0 has 1; first difference at number {expected[1]}"
    with raises("table-invalid", match=text):
        check_rank(changed(path, listed), 1)
