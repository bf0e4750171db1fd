"""A loaded program runs exactly what was checked when its bundle is rebuilt, swapped, truncated or removed."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cgbundle
from cgbundle import self_test
from cgbundle.errors import CgbundleError
from cgbundle.format import archive, file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.program import Program
from cgcompile.bundle import manifest_text
from tests.helpers.places import GOLDEN, ROOT
from tests.helpers.raising import raises

ONE, OTHER = GOLDEN / "v1" / "cpu_mlp.cgb", GOLDEN / "v1" / "cpu_cache.cgb"


@pytest.fixture(autouse=True, scope="module")
def _here() -> None:
    try:
        cgbundle.load(ONE).close()
    except CgbundleError as error:
        pytest.skip(f"the goldens do not run here: {error}")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ONE, tmp_path / "model.cgb"))


def passes(program: Program, origin: Path) -> bool:
    """Tells whether the program gives the answers of the self-test in `origin`, a copy of its bundle."""
    results = self_test.replay_self_test(program)
    stored, expected = program.open_self_test(), Mapped(str(origin / file_names.SELF_TEST), file_names.SELF_TEST)
    try:
        same = [stored.data(name) == expected.data(name) for name in expected.entries] if stored.entries == expected.entries else []
    finally:
        stored.close()
        expected.close()
    return bool(results and same) and all(same) and all(result.error <= result.tolerance for result in results)


def overwrite(source: Path, target: Path) -> None:
    """Overwrites the contents of the same files, as `cp -rf` does."""
    for name in manifest_text.list_files(str(source)):
        (target / name).parent.mkdir(exist_ok=True)
        with open(target / name, "r+b" if (target / name).exists() else "wb") as file:
            file.truncate(0)
            file.write((source / name).read_bytes())
    for name in set(manifest_text.list_files(str(target))) - set(manifest_text.list_files(str(source))):
        (target / name).unlink()


def swap(source: Path, target: Path) -> None:
    """Replaces the bundle, as a build with --force does."""
    target.rename(target.with_name("old"))
    shutil.copytree(source, target)
    shutil.rmtree(target.with_name("old"))


@pytest.mark.parametrize("way", [overwrite, swap])
def test_a_bundle_that_was_built_again_in_its_place_runs_its_own_code(bundle: Path, way: object) -> None:
    with cgbundle.load(bundle) as program:
        assert passes(program, ONE)
    way(OTHER, bundle)  # type: ignore[operator]
    with cgbundle.load(bundle) as program:
        assert passes(program, OTHER)
    way(ONE, bundle)  # type: ignore[operator]
    with cgbundle.load(bundle) as program:
        assert passes(program, ONE)


@pytest.mark.parametrize("way", [swap, lambda source, target: shutil.rmtree(target)], ids=["swapped", "removed"])
def test_a_loaded_program_and_its_new_sessions_stay_what_they_were(bundle: Path, way: object) -> None:
    with cgbundle.load(bundle) as program:
        way(OTHER, bundle)  # type: ignore[operator]
        assert passes(program, ONE)
        with program.session() as session:
            assert passes(session, ONE)


def test_equal_code_is_loaded_once_and_no_descriptor_stays_open(bundle: Path) -> None:
    def seen() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:cgbundle" in line for line in maps)

    for _ in range(2):
        cgbundle.load(bundle).close()
    gc.collect()  # frees objects of earlier tests in reference cycles
    before = seen()
    for _ in range(5):
        cgbundle.load(bundle).close()
    assert seen() == before


def test_weights_that_were_copied_are_not_seen_to_change(tmp_path: Path) -> None:
    """Runs in another process, which would end with SIGBUS if the weights were not copied."""
    bundle = Path(shutil.copytree(ONE, tmp_path / "model.cgb"))
    code = (
        "import os, sys, cgbundle\n"
        "from cgbundle import self_test\n"
        "bundle = sys.argv[1]\n"
        "program = cgbundle.load(bundle, weights='copy')\n"
        "os.truncate(f'{bundle}/weights.safetensors', 0)\n"
        "assert all(result.error <= result.tolerance for result in self_test.replay_self_test(program))\n"
        "print('right')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "bundles"), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True, env=environment)
    assert ran.stdout == "right\n", (ran.returncode, ran.stderr[-500:])


def test_a_shared_object_that_is_cut_off_or_another_library_is_refused(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "other.cpp").write_text("int nothing() { return 0; }")
    subprocess.run(["c++", "-shared", "-fPIC", "-o", tmp_path / "other.so", tmp_path / "other.cpp"], check=True)
    manifest = archive.read_manifest(str(bundle))
    (row,) = [file for file in manifest.files if file.path.startswith(file_names.HOST)]
    data = (bundle / row.path).read_bytes()
    other = (tmp_path / "other.so").read_bytes()
    for contents, code, text in (
        (data[: len(data) // 2], "image-invalid", "cut off"), (data[:4096], "image-invalid", "cut off"),
        (b"", "image-invalid", "not a shared object"), (b"not ELF" * 100, "image-invalid", "not a shared object"),
        (other, "library-refused", "lacks the runtime functions that the manifest promises"),
    ):  # fmt: skip
        (bundle / row.path).write_bytes(contents)
        seal(bundle, attached=True)
        with raises(code, match=text) as caught:
            cgbundle.load(bundle)
        assert str(caught.value).startswith(row.path) and "\n" not in str(caught.value)


def seal(bundle: Path, *, attached: bool = False) -> None:
    """Writes a manifest with the hashes of the changed files, as an attacker would. `attached` also updates the rows after the ELF
    data of shared objects."""
    from dataclasses import replace

    from tests.helpers.bundles import tiny_bundle

    manifest = archive.read_manifest(str(bundle))
    if attached:
        return tiny_bundle.finish(bundle, manifest)
    tiny_bundle.seal(bundle, replace(manifest, files=manifest_text.describe_files(str(bundle))))
