"""Limits of a manifest: values that just fit pass. test_bundle.py has the refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.format import file_names, limits
from cgbundle.format.archive import Archive
from cgbundle.format.schema import Alias, File, Finding, Manifest, Region, TensorSpec
from cgbundle.validate.bundle import check_bundle, check_manifest, checked_manifest, examine
from cgbundle.validate.contents import check_weights
from cgcompile.bundle.manifest_text import encode
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import dimension, signature, spec
from tests.helpers.bundles.tiny_bundle import manifest, write_bundle
from tests.helpers.raising import raises
from tests.pure.validate.test_bundle import FILES, SHA, cpu, cuda, put, put_row, put_step, put_value, reject


def test_memories_may_be_empty_and_may_be_missing() -> None:
    for name in ("state", "inputs", "arena", "host"):
        known = [pair for pair in cpu().memories if pair[0] != name]
        check_manifest(put(memories=(*known, (name, 0)))(cpu()))
        reject(put(memories=(*known, (name, -1)))(cpu()), f"memories[{len(known)}][1]", "-1 is below 0")


def test_values_fill_their_memory_to_its_end() -> None:
    """4 rows of 2 floats are 32 bytes."""
    for index, offset, memory in ((5, 64, "arena"), (3, 32, "host")):
        check_manifest(put_value(index, offset=offset)(cuda()))
        reject(put_value(index, offset=offset + 1)(cuda()), f"programs[1].values[{index}].offset", f"outside memory {memory}")
    nothing = put(memories=tuple([pair for pair in cuda().memories if pair[0] != "host"]))(cuda())
    reject(nothing, "programs[0].values[2].offset", "outside memory host")


def test_no_value_is_in_a_missing_memory() -> None:
    byte = {"dtype": "uint8", "shape": (1,), "strides": (1,), "offset": 0}
    reject(put_value(1, memory="state", **byte)(cuda()), "programs[1].values[1].offset", "outside memory state")
    others = tuple([pair for pair in cuda().memories if pair[0] != "weights"])
    small = put_row("weights", 1, **byte)(put_row("weights", 0, **byte)(cuda()))
    reject(replace(small, memories=others), "weights[0].offset", "outside memory weights")


@pytest.mark.parametrize(("field", "memory", "least", "size"), [("arena", "arena", 96, 96), ("static", "inputs", 48, 256)])
def test_a_program_uses_as_much_as_there_is(field: str, memory: str, least: int, size: int) -> None:
    for used in (least, size):
        check_manifest(put_row("programs", 1, **{field: used})(cuda()))
    reject(put_row("programs", 1, **{field: -1})(cuda()), f"programs[1].{field}", "-1 is below 0")
    reject(put_row("programs", 1, **{field: size + 1})(cuda()), f"programs[1].{field}", f"memory {memory} has less")
    reject(put_row("programs", 0, **{field: 1})(cpu()), f"programs[0].{field}", f"memory {memory} has less")


def test_a_value_without_elements_is_a_value() -> None:
    for rows in (0, 3):
        manifest = signature([], [spec("x", 0, rows)], [spec("y", rows)])
        check_manifest(replace(manifest, files=FILES))


def test_a_value_without_axes_is_a_value() -> None:
    manifest = signature([], [spec("x")], [spec("y")])
    check_manifest(replace(manifest, files=FILES))


@pytest.mark.parametrize(("offset", "fits"), [(256, True), (512 - 8, False), (512, False), (255, False), (-512, False)])
def test_weights_lie_aligned_in_their_memory(offset: int, fits: bool) -> None:
    manifest = put_row("weights", 1, offset=offset)(cuda())
    if fits:
        return check_manifest(manifest)
    reject(manifest, "weights[1].offset")


def test_a_weight_ends_where_its_memory_ends() -> None:
    """The bias has two floats."""
    for size, fits in ((264, True), (263, False)):
        manifest = put(memories=tuple([(name, size if name == "weights" else length) for name, length in cuda().memories]))(cuda())
        check_manifest(manifest) if fits else reject(manifest, "weights[1].offset", "outside memory weights")


def test_a_weight_lies_in_memory_weights_or_state_or_on_the_host_beside_a_gpu() -> None:
    for memory in ("arena", "inputs", "code"):
        reject(put_row("weights", 0, memory=memory)(cuda()), "weights[0].memory", "expected one of weights, state, host")
    reject(put_row("weights", 0, memory="host")(cpu()), "weights[0].memory", "a weight of the cpu target beside its memory")


def test_a_weight_of_host_regions_alone_is_one_that_they_use() -> None:
    used = put_row("weights", 0, memory="host")(cuda())
    check_manifest(used)
    tied = (*used.weights, replace(used.weights[0], name="tied"))
    check_manifest(replace(used, weights=tied))
    graph = (*used.regions[:1], replace(used.regions[1], constants=()), *used.regions[2:])
    reject(replace(used, regions=graph), "weights[0].memory", "no host region uses it")
    moved = (replace(used.regions[0], constants=(("c", 0),)), *graph[1:])
    reject(replace(used, regions=moved), "weights[0].memory", "no host region uses it")


def test_constants_are_weights_that_there_are() -> None:
    count = len(cpu().weights)
    check_manifest(put_row("regions", 0, constants=(("a", 0), ("b", count - 1), ("c", count - 1)))(cpu()))
    reject(put_row("regions", 0, constants=(("a", 0), ("b", count)))(cpu()), "regions[0].constants[1]", f"no weight {count}")


def test_a_target_without_host_regions_needs_no_torch() -> None:
    base = cuda()
    steps = [replace(program.steps[0], outputs=program.outputs) for program in base.entries[0].programs]
    plain = edited(
        base,
        target=replace(base.target, torch=""),
        regions=tuple([region for region in base.regions if region.kind == "graph"]),
        programs=tuple([replace(program, steps=(step,)) for program, step in zip(base.entries[0].programs, steps, strict=True)]),
    )
    check_manifest(plain)
    hosted = Region(name="h", kind="host", reason="", file="host/model.so", constants=())
    reject(replace(plain, regions=(*plain.regions, hosted)), "target.torch", "empty")


@pytest.mark.parametrize("severity", ["refuse", "host", "note"])
def test_findings(severity: str) -> None:
    row = Finding(rule="r", severity=severity, message="", node="", where="", source="", effect="", fix="")
    check_manifest(put(findings=(row, row))(cpu()))
    reject(put(findings=(row, replace(row, severity="no")))(cpu()), "findings[1].severity", "expected one of refuse, host, note")


def test_files_may_be_empty_and_lie_in_folders() -> None:
    check_manifest(put(files=(*FILES, File(path="a/b/c.d", bytes=0, sha256="0123456789abcdef" * 4)))(cpu()))
    for sha in ("g" + "0" * 63, "0" * 63, "0" * 65):
        reject(put(files=(*FILES, File(path="x", bytes=0, sha256=sha)))(cpu()), "files[4].sha256", "is no SHA-256")


def test_paths_and_tables_are_limited() -> None:
    def listed(*paths: str) -> Manifest:
        return put(files=(*FILES, *[File(path=path, bytes=1, sha256=SHA) for path in paths]))(cpu())

    check_manifest(listed("a/" + "x" * limits.PATH_PART))
    reject(listed("a/" + "x" * (limits.PATH_PART + 1)), "files[4].path", "is no path inside the bundle")
    reject(listed("a", "a/b"), "files", "'a' is a file and a folder")
    check_manifest(put_row("files", 0, bytes=limits.TABLE_BYTES + 1)(cpu()))
    table = len(FILES)
    check_manifest(put_row("files", table, bytes=limits.TABLE_BYTES)(cuda()))
    more = limits.TABLE_BYTES + 1
    reject(put_row("files", table, bytes=more)(cuda()), f"files[{table}].bytes", f"a table of {more} bytes, more than the limit")


def test_a_path_on_another_system_is_no_path() -> None:
    reject(put(files=(*FILES, File(path="a/./b", bytes=0, sha256=SHA)))(cpu()), "files[4].path", "is no path inside the bundle")


# --- the signature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["rows", "zeros", "no"])
def test_dimensions(pad: str) -> None:
    manifest = signature([dimension("n", 1, pad=pad), dimension("m", 2, 3, 900)], [spec("x", "n", "m")], [spec("y", "n", "m")])
    check_manifest(replace(manifest, files=FILES))


def test_dimensions_are_limited() -> None:
    names = [f"n{number}" for number in range(limits.DIMENSIONS + 1)]
    for chosen in (names, names[1:]):
        base = signature([dimension(name, 1) for name in chosen], [spec(f"x{name}", name) for name in chosen], [spec("y", *chosen)])
        base = replace(base, files=FILES)
        if chosen is names:
            with raises("manifest-invalid", f"dimensions: {len(names)}, more than the limit of {limits.DIMENSIONS}"):
                check_manifest(base)
        else:
            check_manifest(base)


def test_two_dimensions_of_one_axis_each() -> None:
    base = signature([dimension("n", 1), dimension("m", 2)], [spec("x", "n"), spec("z", "m")], [spec("y", "n", "m")])
    check_manifest(replace(base, files=FILES))
    for index in (0, 1):
        gone = edited(base, files=FILES, inputs=tuple([replace(base.entries[0].inputs[index], name=name) for name in ("x", "z")]))
        reject(gone, "dimensions", f"{'mn'[index]} is the size of no input's axis")


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        (("n",), True), ((("*", "n", 2),), True), ((2, "n"), True), ((3,), False), (("n", "n"), False), ((("+", "n", 1),), False),
        ((("-", "n", 1),), False), ((("//", "n", 2),), False), ((("*", "n", "n"),), False),
    ],
)  # fmt: skip
def test_an_output_can_be_joined(shape: Any, fits: bool) -> None:
    for chunk in (True, False):
        manifest = signature([dimension("n", 2, 4, chunk=chunk)], [spec("x", "n")], [spec("w", "n"), spec("y", *shape)])
        manifest = replace(manifest, files=FILES)
        if fits or not chunk:
            check_manifest(manifest)
        else:
            reject(manifest, "dimensions[0].chunk", "outputs[1] cannot be chunked along n")


@pytest.mark.parametrize(
    ("shape", "fits"), [(("n",), True), ((("*", "n", 3),), True), ((7,), True), (("n", "n"), True), ((("+", "n", 1),), False)]
)
def test_an_input_can_be_cut(shape: Any, fits: bool) -> None:
    for chunk in (True, False):
        manifest = signature([dimension("n", 2, 4, chunk=chunk)], [spec("w", "n"), spec("x", *shape)], [spec("y", "n")])
        manifest = replace(manifest, files=FILES)
        if fits or not chunk:
            check_manifest(manifest)
        else:
            reject(manifest, "dimensions[0].chunk", "inputs[1] cannot be chunked along n")


def test_only_the_dimension_that_is_cut_has_to_be_told_apart() -> None:
    manifest = signature(
        [dimension("n", 2), dimension("m", 3, chunk=False)], [spec("x", "n", ("+", "m", 1))], [spec("y", "n", ("//", "m", 2), "m")]
    )
    check_manifest(replace(manifest, files=FILES))


def written(*places: int, pad: str = "no", chunk: bool = False) -> Manifest:
    names = ("x", "cache", "place")
    manifest = signature([dimension("n", 2, pad=pad, chunk=chunk)], [spec(name, "n") for name in names], [spec("y", "n")])
    bounds = (*manifest.entries[0].self_test.bounds, *[manifest.entries[0].self_test.bounds[0] for _ in places])
    return edited(manifest, files=FILES, mutated_inputs=places, self_test=replace(manifest.entries[0].self_test, bounds=bounds))


def test_on_the_cpu_an_output_that_shares_memory_has_an_offset() -> None:
    manifest = put(aliases=(Alias(output=0, memory="inputs", index=0),))(put_value(1, offset=4)(cpu()))
    check_manifest(manifest)
    reject(edited(manifest, aliases=()), "programs[1].values[1].offset", "a value in host memory has none")


def test_inputs_that_a_call_changes() -> None:
    for places in ((), (0,), (2,), (0, 1, 2)):
        check_manifest(written(*places))
    for places in ((-1,), (3,), (0, 3)):
        reject(written(*places), "mutated_inputs", "no such input")
    for places in ((1, 0), (1, 1)):
        reject(written(*places), "mutated_inputs", "not ascending, or a position occurs twice")
    check_manifest(written(pad="rows", chunk=True))
    for pad, chunk in (("rows", False), ("zeros", False), ("no", True)):
        with raises("manifest-invalid", match="calls write to their inputs"):
            check_manifest(written(0, pad=pad, chunk=chunk))


def test_an_order_of_the_axes_is_one_of_them_all() -> None:
    for order in ((1, 0, 2), (2, 1, 0)):
        manifest = signature([], [spec("x", 2, 3, 4, order=order)], [TensorSpec(name="y", dtype="float32", shape=(), order=())])
        check_manifest(replace(manifest, files=FILES))
        reject(put_row("inputs", 0, order=(*order[:2], 3))(replace(manifest, files=FILES)), "inputs[0].order")
        reject(put_row("inputs", 0, order=(*order[:2], order[0]))(replace(manifest, files=FILES)), "inputs[0].order")


# --- steps -----------------------------------------------------------------------------------------------------------


def test_steps_over_the_last_value_and_region() -> None:
    manifest = cuda()
    count, regions = len(manifest.entries[0].programs[1].values), len(manifest.regions)
    for place in (-1, count):
        reject(put_step(4, inputs=(1, place))(manifest), "programs[1].steps[4]", "no such value")
        reject(put_step(4, outputs=(5, place))(manifest), "programs[1].steps[4]", "no such value")
    for place in (-1, regions):
        reject(put_step(4, region=place)(manifest), "programs[1].steps[4].region", f"no region {place}")


@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_a_copy_is_of_one_value_to_one(field: str) -> None:
    for values in ((), (1, 1), (2, 2)):
        reject(put_step(1, **{field: values})(cuda()), "programs[1].steps[1]", "a copy has one input and one output")


def test_a_copy_on_the_gpu_is_a_copy() -> None:
    manifest = cuda()
    for program in (0, 1):
        steps = list(manifest.entries[0].programs[program].steps)
        steps[3] = replace(steps[3], inputs=(1,))
        manifest = put_row("programs", program, steps=tuple(steps))(manifest)
    check_manifest(manifest)


def test_a_cpu_program_is_one_step_over_all_values() -> None:
    for changes in ({"inputs": (0, 0)}, {"outputs": ()}, {"outputs": (1, 1)}, {"inputs": (1,)}):
        reject(put_step(0, **changes)(cpu()), "programs[1].steps", "a cpu program is one host step over the call's values")


def test_what_an_alias_lies_in_is_written() -> None:
    """An output that shares memory with another needs no step that writes it, but the other output does."""
    manifest = cuda()
    outputs = (*manifest.entries[0].outputs, replace(manifest.entries[0].outputs[0], name="again"))
    result = {"tuple": [{"tensor": 0}, {"tensor": 1}]}
    grown = []
    for program in manifest.entries[0].programs:
        values = (*program.values, program.values[5])
        grown.append(replace(program, values=values, outputs=(5, 6)))
    proofs = tuple([replace(proof, errors=proof.errors * 2) for proof in manifest.entries[0].self_test.proofs])
    self_test = replace(manifest.entries[0].self_test, bounds=manifest.entries[0].self_test.bounds * 2, proofs=proofs)
    base = edited(manifest, outputs=outputs, result=result, programs=tuple(grown), self_test=self_test)
    reject(base, "programs[0].outputs[1]", "value 6, which nothing has written")
    again = edited(base, aliases=(Alias(output=1, memory="outputs", index=0),))
    check_manifest(again)
    reject(put_value(6, offset=32)(again), "programs[1].outputs[1]", "lies outside of what it shares memory with")
    short = replace(grown[0], outputs=(5,))
    for aliases in ((), (Alias(output=1, memory="outputs", index=0),)):
        manifest = edited(base, aliases=aliases, programs=(short, grown[1]))
        reject(manifest, "programs[0].outputs", "1 values, the signature has 2")
    turned = edited(base, programs=tuple([replace(program, outputs=(6, 5)) for program in grown]))
    check_manifest(edited(turned, aliases=(Alias(output=0, memory="outputs", index=1),)))
    reject(edited(turned, aliases=(Alias(output=1, memory="outputs", index=0),)), "programs[0].outputs[0]", "nothing has written")


# --- files -----------------------------------------------------------------------------------------------------------


def damage(path: Path, name: str) -> None:
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)


def test_a_manifest_that_is_read_is_checked(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny.cgb")
    checked = checked_manifest(str(path))
    assert checked == Archive(str(path)).manifest
    (path / file_names.MANIFEST).write_bytes(encode(replace(checked, memories=(("heap", 1),))))
    with raises("manifest-invalid", match="^memories: "):
        checked_manifest(str(path))


def test_loading_hashes_all_but_the_weights(tmp_path: Path) -> None:
    for name in sorted(file.path for file in FILES):
        path = write_bundle(tmp_path / name.replace("/", "-"))
        check_bundle(Archive(str(path)))
        check_bundle(Archive(str(path)), "full")
        assert examine(Archive(str(path))) == []
        damage(path, name)
        with raises("file-damaged", match=name):
            check_bundle(Archive(str(path)), "full")
        if name == file_names.WEIGHTS:
            check_bundle(Archive(str(path)))
        else:
            with raises("file-damaged", match=name):
                check_bundle(Archive(str(path)))
        assert [error.code for error in examine(Archive(str(path)))] == ["file-damaged"]


def test_a_file_that_is_not_listed_is_found_by_a_full_check(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny.cgb")
    (path / "more").write_bytes(b"")
    check_bundle(Archive(str(path)))
    with raises("file-damaged", match="more"):
        check_bundle(Archive(str(path)), "full")
    assert [str(error).partition(":")[0] for error in examine(Archive(str(path)))] == ["more"]


def test_all_that_is_wrong_is_found_file_by_file(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny.cgb")
    sound = Archive(str(path)).manifest
    broken = ArchiveOf(path, put_row("weights", 0, name="nothing", tensor="nothing")(sound))
    assert [error.code for error in examine(broken)] == ["weights-invalid", "manifest-invalid"]
    assert [error.code for error in examine(ArchiveOf(path, put(memories=(("heap", 1),))(sound)))] == ["manifest-invalid"]
    for name in (file_names.WEIGHTS, file_names.PROGRAM):
        damage(path, name)
    assert [str(error).partition(":")[0] for error in examine(Archive(str(path)))] == [file_names.PROGRAM, file_names.WEIGHTS]


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True), ({"shape": (3, 2), "strides": (1, 3)}, True), ({"shape": (3, 2), "strides": (2, 1)}, False),
        ({"shape": (6,), "strides": (1,)}, False), ({"dtype": "int32"}, False),
        ({"shape": (2, 3, 1), "strides": (3, 1, 1)}, False), ({"tensor": "other"}, False),
    ],
)  # fmt: skip
def test_weights_are_those_of_the_file(tmp_path: Path, changes: dict[str, Any], fits: bool) -> None:
    """In the file the weight has the shape (2, 3), row-major."""
    bundle = ArchiveOf(write_bundle(tmp_path / "tiny.cgb"), put_row("weights", 0, **changes)(manifest()))
    if fits:
        return check_weights(bundle)
    with raises("weights-invalid", match="first.weight|other"):
        check_weights(bundle)


def test_weights_behind_a_row_of_state_are_checked() -> None:
    manifest = cuda()
    state = replace(manifest.weights[0], name="kept", tensor="kept", memory="state", offset=0)
    manifest = replace(manifest, weights=(*manifest.weights, state, replace(manifest.weights[1], name="last", offset=128)))
    reject(replace(manifest, memories=(*manifest.memories, ("state", 256))), "weights[3].offset", "is not aligned")


# --- contents of a signature -----------------------------------------------------------------------------------------


def test_a_range_is_of_whole_numbers_alone() -> None:
    def ranged(dtype: str, *bounds: int) -> Manifest:
        manifest = signature([dimension("n", 2)], [spec("ids", "n", dtype=dtype)], [spec("y", "n")])
        return put_row("inputs", 0, range=bounds or None)(replace(manifest, files=FILES))

    check_manifest(ranged("int64", 0, 100))
    reject(put_row("outputs", 0, dtype="int64", range=(0, 100))(ranged("int64")), "outputs[0].range", "is no range of indices")
    check_manifest(ranged("float32"))
    reject(ranged("float32", 0, 100), "inputs[0].range", "is no range of indices")
    for bounds in ((0, 0), (5, 4)):
        reject(ranged("int64", *bounds), "inputs[0].range", "is no range of indices")
    for bounds in ((0,), (0, 1, 2)):
        reject(ranged("int64", *bounds), "inputs[0].range", "expected 2 values")


def test_the_rows_of_state_are_looked_at() -> None:
    manifest = cuda()
    row = replace(manifest.weights[0], name="cache", tensor="cache", memory="state", offset=256)
    memories = (*manifest.memories, ("state", 256 + 4096))
    reject(replace(manifest, weights=(*manifest.weights, replace(row, offset=128)), memories=memories), "weights[2].offset")


def test_parameters_by_name_come_last() -> None:
    manifest = signature([], [spec("x", 2), spec("y", 2)], [spec("z", 2)])
    first, last = manifest.entries[0].parameters[0], replace(manifest.entries[0].parameters[0], keyword=True)
    check_manifest(edited(manifest, files=FILES, parameters=(first, last)))
    check_manifest(edited(manifest, files=FILES, parameters=(last, last)))
    reject(edited(manifest, files=FILES, parameters=(last, first)), "parameters[1].keyword", "follows one by name")
