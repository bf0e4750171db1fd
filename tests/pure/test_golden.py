"""The commands and the decoders of this version read the golden bundles of every version, and detect damage in them.

`make golden` adds them (tests/golden/make.py). None of this needs a GPU or torch, except the self-test of the cpu goldens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cgbundle
from cgbundle import self_test
from cgbundle.errors import BundleError, CgbundleError, MachineError
from cgbundle.format import archive, file_names
from cgbundle.format.file_names import all_programs
from cgbundle.format.schema import MEMORIES, VERSION, Manifest
from cgbundle.format.table import Table
from cgbundle.validate import bundle as verify
from cgbundle.validate.module_state import Address, check_module_states, decode_states
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import ConditionalNode, EmptyNode, KernelNode, MemcpyNode, MemsetNode, Recording, encode_states
from cgcompile.targets.cuda.elf import read_cubin
from cgcompile.targets.instruction_sets import LEVELS, common_level
from cgcompile_cli import main
from tests.helpers.bundles import tiny_bundle
from tests.helpers.places import GOLDEN, skip_older_torch
from tests.helpers.raising import raises

HOME = GOLDEN
GOLDENS = sorted(HOME.glob("v*/*.cgb"))
LIMIT = 4_500_000
"""Limit in bytes for all goldens of a version for one kind of target."""

FLIPS = (0, 0.5, 1)
"""Where in a file a byte is changed: at its start, middle and end."""


@pytest.fixture(params=GOLDENS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def golden(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def manifest(golden: Path) -> Manifest:
    return archive.read_manifest(str(golden))


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden, tmp_path / golden.name))


def call(*arguments: object) -> tuple[int, str]:
    """Returns the exit code and standard output of a command."""
    result = CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "100"})
    return result.exit_code, result.stdout


# --- the set -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not any(HOME.glob("v*")), reason="no golden has been published yet")
def test_every_format_version_has_goldens_of_both_targets() -> None:
    for version in range(1, VERSION + 1):
        kinds = {archive.read_manifest(str(path)).target.kind for path in GOLDENS if path.parent.name == f"v{version}"}
        assert "cpu" in kinds, f"v{version}: run `make golden`"


def test_goldens_are_small() -> None:
    for folder in {path.parent for path in GOLDENS}:
        for kind in ("cpu", "cuda"):
            sizes = [bytes_of(path) for path in folder.glob("*.cgb") if archive.read_manifest(str(path)).target.kind == kind]
            assert sum(sizes) <= LIMIT, (folder.name, sizes)


def test_goldens_run_on_every_supported_processor(manifest: Manifest) -> None:
    """A golden for its builder's own processor would fail on other machines."""
    target = manifest.target
    common = common_level(target.arch, {name for level in LEVELS for name in level.features})
    assert set(target.features) <= (set(common.features) if common else set())


def test_nothing_but_goldens_lies_in_the_folders() -> None:
    for path in HOME.glob("v*/*"):
        assert path in GOLDENS, path


# --- undamaged bundles -------------------------------------------------------------------------------------------


def test_inspect_shows_a_golden(golden: Path, manifest: Manifest) -> None:
    code, text = call("inspect", golden)
    assert code == 0 and manifest.name in text and (manifest.target.level or manifest.target.arch) in text
    code, text = call("inspect", golden, "--json")
    assert code == 0 and json.loads(text)["manifest"]["name"] == manifest.name
    for entry in manifest.entries:
        assert entry.name in [row["entry"] for row in json.loads(call("inspect", golden, "--json")[1])["entries"]]
        for program in entry.programs:
            key = f"{entry.name}:{'x'.join(map(str, program.key)) or '-'}"
            code, text = call("inspect", golden, "--graph", key, "--json")
            assert code == 0 and tuple(json.loads(text)["key"]) == program.key


def test_verify_finds_nothing(golden: Path, manifest: Manifest) -> None:
    verify.check_bundle(archive.Archive(str(golden)), "full")
    assert verify.examine(archive.Archive(str(golden))) == []
    code, text = call("verify", golden, "--json")
    assert code == 0 and json.loads(text)["ok"]


def test_the_manifest_is_canonical(golden: Path, manifest: Manifest) -> None:
    assert manifest.version == int(golden.parent.name.removeprefix("v"))
    assert manifest_text.encode(manifest) == (golden / file_names.MANIFEST).read_bytes()


def test_every_key_was_verified_by_a_replay_or_by_interpreting_it(manifest: Manifest) -> None:
    traced = dict(manifest.provenance.options).get("record") == "cross-compile"
    for proof in [proof for entry in manifest.entries for proof in entry.self_test.proofs]:
        assert proof.method == ("interpret" if traced else "replay") and proof.error <= proof.tolerance
    if manifest.target.kind == "cuda":
        assert (manifest.entries[0].self_test.compare == self_test.BITS) is not traced


def test_the_self_test_of_a_cpu_golden_passes_here(golden: Path, manifest: Manifest) -> None:
    if manifest.target.kind != "cpu":
        pytest.skip("for a GPU: tests/gpu/test_golden.py")
    skip_older_torch()
    answer = self_test.fresh(str(golden))
    if answer.get("code") in ("wrong-machine", "library-missing"):
        pytest.skip(answer["error"])
    assert "error" not in answer, answer
    assert all(row["passed"] for row in answer["results"]) and not answer["torch_imported"]


def test_a_machine_that_cannot_run_a_golden_says_so(golden: Path, manifest: Manifest) -> None:
    try:
        with cgbundle.load(golden) as program:
            assert program.int_keys == tuple(entry.key for entry in manifest.entries[0].programs)
    except MachineError as error:
        assert error.exit_code == 2 and "\n" not in str(error)


# --- tables ------------------------------------------------------------------------------------------------------


def table_files(manifest: Manifest) -> list[str]:
    return [step.file for program in all_programs(manifest) for step in program.steps if step.file]


def recordings(golden: Path, manifest: Manifest) -> list[Recording]:
    return [tables.decode((golden / file).read_bytes(), file) for file in table_files(manifest)]


def test_tables_decode_check_and_encode_to_themselves(golden: Path, manifest: Manifest) -> None:
    images = {path.name for path in golden.glob("kernels/*")}
    for file in table_files(manifest):
        data = (golden / file).read_bytes()
        check_recording(Table(data, file), dict(manifest.memories), images)
        assert tables.encode(tables.decode(data, file)) == data
    if manifest.module_state:
        data = (golden / manifest.module_state).read_bytes()
        states = decode_states(data)
        check_module_states(states, manifest.module_state, dict(manifest.memories), images)
        assert encode_states(states) == data


def test_every_address_is_a_relocation_inside_its_memory(golden: Path, manifest: Manifest) -> None:
    memories = dict(manifest.memories)
    for program, recording in zip(all_programs(manifest), recordings(golden, manifest), strict=False):
        assert recording.key == program.key and recording.nodes
        limits = memories | {"arena": program.arena, "inputs": program.static}
        for node in recording.nodes:
            for target, extent in targets(node):
                assert target.offset + extent <= limits[MEMORIES[target.memory]], (program.key, node)
        reached = {target.memory for node in recording.nodes for target, _ in targets(node)}
        assert {MEMORIES.index("weights"), MEMORIES.index("inputs")} <= reached


def targets(node: object) -> list[tuple[Address, int]]:
    """Returns (address, number of bytes that must exist there) for every address of a node."""
    if isinstance(node, KernelNode):
        return [(relocation.target, 0) for relocation in node.relocations]
    if isinstance(node, MemsetNode):
        return [(node.target, (node.height - 1) * node.pitch + node.width * node.element)]
    if isinstance(node, MemcpyNode):
        return [(node.source, 0), (node.target, 0)]
    assert isinstance(node, EmptyNode | ConditionalNode)
    return []


def test_relocated_and_undefined_words_are_zero(golden: Path, manifest: Manifest) -> None:
    for recording in recordings(golden, manifest):
        for node in recording.nodes:
            if isinstance(node, KernelNode):
                spans = [(relocation.at, 8) for relocation in node.relocations] + list(node.undefined)
                assert not any(any(node.block[at : at + size]) for at, size in spans)
                ends = sorted((at, at + size) for at, size in spans)
                assert all(ends[i][1] <= ends[i + 1][0] for i in range(len(ends) - 1)), "they overlap"


def test_every_function_is_in_the_image_that_it_names(golden: Path, manifest: Manifest) -> None:
    used = set()
    for recording in recordings(golden, manifest):
        for function in recording.functions:
            used.add(function.image)
            assert function.symbol in read_cubin((golden / "kernels" / function.image).read_bytes()).functions
    assert used == {path.name for path in golden.glob("kernels/*")}, "an image that no recording uses"


def test_outputs_and_inputs_lie_where_the_recording_reaches(manifest: Manifest) -> None:
    for program in all_programs(manifest):
        for index in program.inputs:
            assert program.values[index].memory == ("inputs" if manifest.target.kind == "cuda" else "host")
    if manifest.target.kind == "cuda":
        assert dict(manifest.memories)["arena"] == max(program.arena for program in all_programs(manifest))


# --- damage ------------------------------------------------------------------------------------------------------


def damage(bundle: Path) -> list[str]:
    """Returns what `verify` reports about a bundle."""
    try:
        return [str(error) for error in verify.examine(archive.Archive(str(bundle)))]
    except CgbundleError as error:
        return [str(error)]


def change(path: Path, edit: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)


@pytest.mark.parametrize("place", FLIPS)
def test_a_changed_byte_in_any_file_is_found(copy: Path, place: float) -> None:
    for name in manifest_text.list_files(str(copy)):
        original = (copy / name).read_bytes()

        def flip(data: bytearray) -> None:
            data[int(place * (len(data) - 1))] ^= 0x01

        change(copy / name, flip)
        defects = damage(copy)
        assert defects and all("\n" not in text for text in defects), name
        assert name == file_names.MANIFEST or any(text.startswith(name) for text in defects), (name, defects)
        code, _ = call("verify", copy, "--json")
        assert code in (1, 2)
        (copy / name).write_bytes(original)
    assert not damage(copy)


@pytest.mark.parametrize("left", [0, 0.5, 0.999])
def test_a_truncated_file_is_found_before_it_is_loaded(copy: Path, left: float) -> None:
    for name in manifest_text.list_files(str(copy)):
        original = (copy / name).read_bytes()
        change(copy / name, lambda data: data.__delitem__(slice(int(left * len(data)), None)))
        assert damage(copy), name
        with pytest.raises(CgbundleError):
            cgbundle.load(copy)
        (copy / name).write_bytes(original)


def test_a_missing_file_and_a_stranger_are_found(copy: Path) -> None:
    (copy / "stranger").write_bytes(b"")
    assert any("stranger" in text for text in damage(copy))
    (copy / "stranger").unlink()
    for name in manifest_text.list_files(str(copy)):
        original = (copy / name).read_bytes()
        (copy / name).unlink()
        with pytest.raises(CgbundleError):
            cgbundle.load(copy)
        (copy / name).write_bytes(original)


def test_a_changed_byte_in_a_table_is_refused_or_harmless(golden: Path, manifest: Manifest) -> None:
    """The check of a table does not rely on the hash: a changed byte gives table-invalid or another valid table."""
    images = {path.name for path in golden.glob("kernels/*")}
    for file in table_files(manifest):
        data = (golden / file).read_bytes()
        for at in range(0, len(data), max(1, len(data) // 400)):
            for bit in (0x01, 0x80):
                changed = bytearray(data)
                changed[at] ^= bit
                try:
                    check_recording(Table(bytes(changed), file), dict(manifest.memories), images)
                except BundleError as error:
                    assert str(error).startswith(file)


def test_a_truncated_table_is_refused(golden: Path, manifest: Manifest) -> None:
    for file in table_files(manifest):
        data = (golden / file).read_bytes()
        for length in range(0, len(data), max(1, len(data) // 200)):
            with raises("table-invalid"):
                Table(data[:length], file)


def test_another_machine_is_named_before_anything_is_loaded(copy: Path) -> None:
    manifest = archive.read_manifest(str(copy))
    arch = "sm_20" if manifest.target.kind == "cuda" else "pdp11"
    tiny_bundle.seal(copy, replace(manifest, target=replace(manifest.target, arch=arch)))
    assert not damage(copy), "inspect and verify work anywhere"
    with pytest.raises((MachineError, MachineError)):
        cgbundle.load(copy)


def bytes_of(path: Path) -> int:
    return sum(os.path.getsize(path / name) for name in manifest_text.list_files(str(path)))
