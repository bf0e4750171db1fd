"""`cgcompile diff` reports every kind of difference by itself, and nothing for equal bundles."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from cgbundle.errors import CgbundleError
from cgbundle.format import archive, file_names, manifest_json, safetensors_files
from cgbundle.format.schema import VERSION, Alias, File, Finding, Manifest, Proof, Weight
from cgbundle.validate.module_state import Address, Relocation
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Edge, Function, KernelNode, MemsetNode, Recording, encode_states
from cgcompile.tools.diff import contents, manifests, recordings
from cgcompile.tools.diff.bundle_files import BundleFiles, open_bundle
from cgcompile.tools.diff.compare import IGNORED_FIELDS, compare
from cgcompile.tools.diff.differences import Difference
from cgcompile_cli import main
from cgcompile_cli.commands import diff
from tests.helpers.bundles import cuda_bundles, tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.places import GOLDEN, ROOT

GOLDENS = sorted((GOLDEN).glob("v*/*.cgb"))
MLP = next(path for path in GOLDENS if path.parts[-2:] == ("v1", "mlp.cgb"))
"""Two captured kernels for batch 1 and 4, on a GPU."""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, ["diff", *map(str, arguments)], prog_name="cgcompile", env={"COLUMNS": "80"})


def differences(a: Path, b: Path) -> tuple[Difference, ...]:
    return compare(open_bundle(str(a)), open_bundle(str(b)))


def lines(rows: tuple[Difference, ...]) -> list[str]:
    """Returns the differences as lines: part, name, field, what."""
    return [f"{row.part}: {row.name}: {row.field} {row.note or f'{row.a} -> {row.b}'}".replace("  ", " ") for row in rows]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Writes a bundle for the CPU by hand."""
    return tiny_bundle.write_bundle(tmp_path / "tiny.cgb")


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[tiny_bundle.Change], Path]:
    """Returns a function that writes the bundle `tiny` with another manifest."""
    return lambda change: tiny_bundle.write_bundle(tmp_path / "changed.cgb", change)


def reseal(folder: Path, change: tiny_bundle.Change = lambda manifest: manifest) -> None:
    """Rewrites the manifest of a bundle whose files were changed."""
    manifest = archive.read_manifest(str(folder))
    tiny_bundle.seal(folder, change(replace(manifest, files=manifest_text.describe_files(str(folder)))))


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """Returns a copy of the golden `mlp`."""
    return Path(shutil.copytree(MLP, tmp_path / "mlp.cgb"))


def record(folder: Path, change: Callable[[Recording], Recording], key: int = 4) -> None:
    """Changes the recording of one int_key of a copy of `mlp`."""
    file = folder / "graphs" / f"model-{key}.bin"
    file.write_bytes(tables.encode(change(tables.decode(file.read_bytes()))))
    reseal(folder)


def relaunch(number: int, **changes: Any) -> Callable[[Recording], Recording]:
    """Returns a change of one node of a recording."""

    def change(recording: Recording) -> Recording:
        nodes = list(recording.nodes)
        nodes[number] = replace(nodes[number], **changes)
        return replace(recording, nodes=tuple(nodes))

    return change


# --- no difference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_bundle_does_not_differ_from_its_copy(golden: Path, tmp_path: Path) -> None:
    result = call(golden, shutil.copytree(golden, tmp_path / "copy.cgb"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "no difference\n", "")
    assert json.loads(call(golden, golden, "--json").stdout)["different"] is False


def test_where_and_when_a_bundle_was_built_is_no_difference(tiny: Path, changed: Callable[[tiny_bundle.Change], Path]) -> None:
    elsewhere = {name: "2031-01-01" for name in IGNORED_FIELDS}
    other = changed(lambda manifest: replace(manifest, provenance=replace(manifest.provenance, **elsewhere)))
    assert (tiny / file_names.MANIFEST).read_bytes() != (other / file_names.MANIFEST).read_bytes()
    assert differences(tiny, other) == ()


def test_bytes_that_no_kernel_reads_are_no_difference(gpu: Path) -> None:
    record(gpu, lambda recording: relaunch(0, undefined=((8, 4),), block=_byte(recording, 0, 8, 0))(recording))
    other = Path(shutil.copytree(gpu, gpu.parent / "other.cgb"))
    record(other, lambda recording: relaunch(0, undefined=(), block=_byte(recording, 0, 9, 77), relocations=())(recording))
    assert [row.note for row in differences(gpu, other)] != [], "the relocations are gone"
    record(gpu, lambda recording: relaunch(0, relocations=())(recording))
    assert differences(gpu, other) == ()
    record(other, lambda recording: relaunch(0, block=_byte(recording, 0, 12, 77))(recording))
    assert len(differences(gpu, other)) == 1, "the byte behind them is read"


def _byte(recording: Recording, number: int, at: int, value: int) -> bytes:
    block = bytearray(recording.nodes[number].block)  # type: ignore[union-attr]
    block[at] = value
    return bytes(block)


# --- manifests --------------------------------------------------------------------------------------------------


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every JSON value without children, and of every list."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, dict | list):
            if isinstance(item, list):
                yield (*path, key)
            yield from _leaves(item, (*path, key))
        else:
            yield (*path, key)


def _others(value: Any) -> list[Any]:
    """Returns values to replace a JSON value with. For a text these include names that are valid only in some fields."""
    if isinstance(value, list):
        return [value[:-1]]
    if isinstance(value, bool):
        return [not value]
    named = [
        "bool",
        "int8",
        "zeros",
        "arena",
        "inputs",
        "tolerance",
        "bits",
        "interpret",
        "none",
        "note",
        "graph",
        "host",
        "folded",
    ]
    return [value + 1] if isinstance(value, int | float) else [name for name in (f"{value}x", *named, "f" * 64) if name != value]


def _uncounted(path: tuple[Any, ...]) -> bool:
    """Returns whether `diff` need not report a field: files are compared instead, it is ignored, or it follows from the dimensions
    (int_keys)."""
    names = [part for part in path if isinstance(part, str)]
    return (
        names[0] in ("sha256", "files", "module_state")
        or names[-1] in IGNORED_FIELDS
        or names[-2:] == ["steps", "file"]
        or names[-1:] in (["programs"], ["entries"], ["version"])
        or "key" in names
    )


@pytest.mark.parametrize("golden", [*GOLDENS, None], ids=lambda path: f"{path.parent.name}/{path.stem}" if path else "newest")
def test_everything_else_in_a_manifest_counts(golden: Path | None) -> None:
    manifest = archive.read_manifest(str(golden)) if golden else full()
    plain = json.loads(manifest_text.encode(manifest))
    paths = [path for path in _leaves(plain) if not _uncounted(path)]
    tried = 0
    for path in paths:
        changed = json.loads(json.dumps(plain))
        *outer, last = path
        inner = changed
        for key in outer:
            inner = inner[key]
        if isinstance(inner[last], list) and not inner[last]:
            continue
        for value in _others(inner[last]):
            inner[last] = value
            try:
                other = decoded(changed)
                differences = list(manifests.compare(manifest, other))
            except (CgbundleError, IndexError, KeyError, ValueError):
                continue  # such a manifest is refused when it is opened
            assert differences, path
            tried += 1
            break
    assert tried > 0.75 * len(paths) > 100


def decoded(plain: dict[str, Any]) -> Manifest:
    """Returns a manifest from JSON, whatever its hash is."""
    plain = {name: value for name, value in plain.items() if name != manifest_json.SEAL}
    manifest: Manifest = manifest_json._record(manifest_json.schema.Manifest)(plain, "")
    return manifest


def full() -> Manifest:
    """Returns a manifest of the newest format with something in every field."""
    base = tiny_bundle.manifest()
    state = Weight(name="cache", tensor="cache", dtype="int64", shape=(2,), strides=(1,), memory="state", offset=256)
    return edited(
        base,
        weights=(*base.weights, state),
        random=3,
        mutated_inputs=(0,),
        aliases=(Alias(output=0, memory="state", index=3),),
        memories=(*base.memories, ("state", 512)),
        findings=(finding("item"),),
        allowed=("other-rule",),
    )


def better(manifest: Manifest) -> tuple[Proof, ...]:
    """Returns the proofs, with an error of 0 in the first one."""
    first, *others = manifest.entries[0].self_test.proofs
    return (replace(first, error=0.0), *others)


def finding(rule: str, **changes: str) -> Finding:
    texts = {name: name for name in ("message", "node", "where", "source", "effect", "fix")}
    return Finding(rule=rule, **({"severity": "note"} | texts | changes))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: replace(m, name="other"), ["bundle: name: tiny -> other"]),
        (
            lambda m: replace(m, target=replace(m.target, torch="2.13", features=("sse2", "avx"))),
            ["target: torch: 2.11 -> 2.13", "target: features: only in A: sse; only in B: avx"],
        ),
        (
            lambda m: edited(m, inputs=(replace(m.entries[0].inputs[0], dtype="float16"),)),
            ["signature: input x: dtype float32 -> float16"],
        ),
        (lambda m: edited(m, mutated_inputs=(0,)), ["signature: input x: mutated no -> yes"]),
        (
            lambda m: edited(m, aliases=(Alias(output=0, memory="inputs", index=0),)),
            ["signature: output y: shares none -> input x"],
        ),
        (
            lambda m: edited(m, aliases=(Alias(output=0, memory="weights", index=1),)),
            ["signature: output y: shares none -> weights first.bias"],
        ),
        (lambda m: replace(m, random=1), ["signature: random numbers: none -> first.bias"]),
        (
            lambda m: edited(m, result={"tuple": [{"tensor": 0}]}),
            ['signature: nesting of the outputs: {"tensor":0} -> {"tuple":[{"tensor":0}]}'],
        ),
        (
            lambda m: edited(m, dimensions=(replace(m.entries[0].dimensions[0], sizes=(1, 8), chunk=False),)),
            ["sizes: batch: sizes [1, 4] -> [1, 8]", "sizes: batch: chunk yes -> no"],
        ),
        (
            lambda m: replace(m, memories=(("weights", 64), ("state", 8))),
            ["memory: weights: 32 -> 64 bytes (+32)", "memory: state: none -> 8"],
        ),
        (
            lambda m: edited(m, programs=(m.entries[0].programs[0], replace(m.entries[0].programs[1], arena=512))),
            ["memory: batch=4: arena 0 -> 512 bytes (+512)"],
        ),
        (
            lambda m: replace(m, weights=(m.weights[0], replace(m.weights[1], memory="state", offset=512), m.weights[2])),
            [
                "memory: places of weights: 1 of 3 lie elsewhere, first first.bias: 0 -> 512",
                "weights: first.bias: memory weights -> state",
            ],
        ),
        (
            lambda m: replace(m, weights=(*m.weights[:2], replace(m.weights[2], name="tied"))),
            ["weights: tied.bias: float32 [2], tensor first.bias -> None", "weights: tied: None -> float32 [2], tensor first.bias"],
        ),
        (
            lambda m: replace(m, weights=(replace(m.weights[0], dtype="float16", shape=(3, 2), strides=(1, 3)), *m.weights[1:])),
            [
                "weights: first.weight: dtype float32 -> float16", "weights: first.weight: shape [2, 3] -> [3, 2]",
                "weights: first.weight: layout row-major -> [1, 3]",
            ],
        ),
        (
            lambda m: replace(m, regions=(replace(m.regions[0], reason="why not", constants=(("c0", 2),)),)),
            [
                "regions: model: reason the cpu target has no graphs -> why not",
                "regions: model: constant c0 first.weight -> tied.bias",
                "regions: model: constant c1 first.bias -> none",
            ],
        ),
        (
            lambda m: edited(m, programs=(replace(m.entries[0].programs[0], steps=()), m.entries[0].programs[1])),
            ["steps: batch=1: [host model] -> []"],
        ),
        (
            lambda m: edited(m, programs=(strided(m), m.entries[0].programs[1])),
            ["steps: batch=1: input x v0 float32 [1, 3] strides [3, 1] at host+0 -> v0 float32 [1, 3] strides [4, 1] at host+0; "
             "1 more of 4 values differ"],
        ),
        (
            lambda m: edited(m, findings=(finding("item", source="", effect="", fix=""),)),
            ["findings: item: None -> severity note, message message, node node, where where"],
        ),
        (lambda m: edited(m, allowed=("cpu-sync",)), ["findings: allowed: only in B: cpu-sync"]),
        (
            lambda m: edited(m, self_test=replace(m.entries[0].self_test, compare="bits", proofs=better(m))),
            ["self-test: compare: tolerance -> bits", "self-test: proof batch=1: error 1e-07 -> 0.0"],
        ),
        (
            lambda m: replace(m, provenance=replace(m.provenance, versions=(("torch", "2.11.0"),), options=(("target", "cuda"),))),
            ["versions: cgcompile: 0.1.0 -> none", "versions: torch: 2.13.0 -> 2.11.0", "options: target: cpu -> cuda"],
        ),
        (lambda m: replace(m, files=(*m.files, File(path="notes", bytes=3, sha256="0" * 64))), ["files: notes: None -> 3 bytes"]),
    ],
)  # fmt: skip
def test_what_a_manifest_says(change: tiny_bundle.Change, expected: list[str], tiny: Path) -> None:
    a = open_bundle(str(tiny))
    manifest = change(a.manifest)
    b = BundleFiles(path=a.path, bundle=a.bundle, manifest=manifest, files={file.path: file for file in manifest.files})
    assert lines(compare(a, b)) == expected
    assert {row.part for row in compare(b, a)} == {row.part for row in compare(a, b)}


def test_the_bytes_of_weights_on_a_gpu_are_explained() -> None:
    a = tiny_bundle.manifest()
    b = replace(a, memories=(("weights", 1024),), target=replace(a.target, kind="cuda"))
    (line,) = [line for line in lines(tuple(manifests.compare(a, b))) if line.startswith("memory: weights")]
    assert line == "memory: weights: 32 -> 1024 bytes (+992): on a GPU a tensor begins at a multiple of 256 bytes"


def strided(manifest: Manifest) -> Any:
    program = manifest.entries[0].programs[0]
    return replace(program, values=(replace(program.values[0], strides=(4, 1)), program.values[1]))


def test_findings_of_one_rule_are_told_apart() -> None:
    a = edited(tiny_bundle.manifest(), findings=(finding("item", where="m.py:3"), finding("item", where="m.py:5")))
    b = edited(a, findings=(a.entries[0].findings[0], finding("item", where="m.py:6")))
    assert lines(tuple(manifests.compare(a, b))) == ["findings: item (2): where m.py:5 -> m.py:6"]


def test_another_order_is_told() -> None:
    a = tiny_bundle.manifest()
    a = replace(a, regions=(replace(a.regions[0], constants=()),))
    b = replace(a, weights=(a.weights[1], a.weights[0], a.weights[2]))
    assert lines(tuple(manifests.compare(a, b))) == ["weights: order: of those in both, number 0 is first.weight -> first.bias"]


# --- tensors and files ------------------------------------------------------------------------------------------


def weigh(folder: Path, tensors: dict[str, safetensors_files.Tensor]) -> None:
    with open(folder / file_names.WEIGHTS, "wb") as file:
        safetensors_files.write(file, tensors)
    reseal(folder)


def test_elements_of_weights_are_counted(tiny: Path, tmp_path: Path) -> None:
    other = tiny_bundle.write_bundle(tmp_path / "other.cgb")
    values = {
        "first.weight": ("float32", (2, 3), tiny_bundle.floats(range(6))),
        "first.bias": ("float32", (2,), tiny_bundle.floats(range(1, 3))),
    }
    weigh(other, values)
    rows = differences(tiny, other)
    assert lines(rows) == ["weights: first.bias: 2 of 2 elements differ (float32)"], "the tied name is not told again"
    assert rows[0].facts == {"elements": 2, "differ": 2} and rows[0].change == "changed"
    data = bytearray((tiny / file_names.WEIGHTS).read_bytes())
    data[-1] ^= 1
    (other / file_names.WEIGHTS).write_bytes(data)
    reseal(other)
    assert lines(differences(tiny, other)) == ["weights: first.weight: 1 of 6 elements differ (float32)"]


def test_a_weights_file_with_the_same_tensors_in_other_bytes_is_told(tiny: Path, tmp_path: Path) -> None:
    other = tiny_bundle.write_bundle(tmp_path / "other.cgb")
    data = (other / file_names.WEIGHTS).read_bytes()
    spaced = data.replace(b',"first.weight"', b', "first.weight"', 1).replace(b"}} ", b"}}", 1)
    assert len(spaced) == len(data) and spaced != data
    (other / file_names.WEIGHTS).write_bytes(spaced)
    reseal(other)
    assert lines(differences(tiny, other)) == ["files: weights.safetensors: other contents, 288 bytes"]


def test_the_self_test_is_compared_tensor_by_tensor(tiny: Path, tmp_path: Path) -> None:
    other = tiny_bundle.write_bundle(tmp_path / "other.cgb")
    tensors = tiny_bundle.self_test_tensors()
    tensors["4/output/0"] = ("float32", (4, 2), tiny_bundle.floats(range(1, 9)))
    with open(other / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, tensors)
    reseal(other)
    assert lines(differences(tiny, other)) == ["self-test: 4/output/0: 8 of 8 elements differ (float32)"]


@pytest.mark.parametrize("name", [file_names.PROGRAM, tiny_bundle.HOST_FILE])
def test_other_files_by_their_contents(name: str, tiny: Path, tmp_path: Path) -> None:
    other = tiny_bundle.write_bundle(tmp_path / "other.cgb")
    size = (tiny / name).stat().st_size
    (other / name).write_bytes(bytes(size))
    reseal(other)
    assert lines(differences(tiny, other)) == [f"files: {name}: other contents, {size} bytes"]
    (other / name).write_bytes(bytes(size + 1))
    reseal(other)
    assert lines(differences(tiny, other)) == [f"files: {name}: {size} bytes -> {size + 1} bytes"]


@given(
    st.sampled_from((1, 2, 4, 8, 16)),
    st.integers(0, 20_000),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=8),
)
def test_differing_elements_are_counted_by_the_definition(width: int, number: int, flips: list[tuple[int, int]]) -> None:
    a = bytes(range(256)) * (number * width // 256 + 1)
    a = a[: number * width]
    b = bytearray(a)
    for at, mask in flips if number else []:
        b[at % len(b)] ^= mask
    expected = sum(a[at : at + width] != b[at : at + width] for at in range(0, len(a), width))
    assert contents.differing(memoryview(a), memoryview(b), width) == expected


def test_all_elements_of_many_blocks() -> None:
    a, b = bytes(5 * contents.BLOCK + 12), b"\1\0\0\0" * (5 * contents.BLOCK // 4 + 3)
    assert contents.differing(memoryview(a), memoryview(b), 4) == len(a) // 4


# --- graphs -----------------------------------------------------------------------------------------------------


def test_a_kernel_from_another_image(gpu: Path) -> None:
    image = sorted((gpu / "kernels").iterdir())[0]
    data = image.read_bytes() + bytes(8)
    name = sha256(data).hexdigest()
    (gpu / "kernels" / name).write_bytes(data)
    symbols = set()
    for key in (1, 4):

        def change(recording: Recording) -> Recording:
            symbols.update(function.symbol for function in recording.functions if function.image == image.name)
            return replace(
                recording,
                functions=tuple(
                    [
                        replace(function, image=name) if function.image == image.name else function
                        for function in recording.functions
                    ]
                ),
            )

        record(gpu, change, key)
    image.unlink()
    reseal(gpu)
    (symbol,) = symbols
    rows = differences(MLP, gpu)
    assert [row.part for row in rows] == ["kernels", "nodes"]
    assert (rows[0].name, rows[0].field) == (symbol, "image")
    assert rows[0].a == f"{image.name[:12]} (1 launch)" and rows[0].b == f"{name[:12]} (1 launch)"
    assert rows[0].facts == {"launches_a": 1, "launches_b": 1}
    assert f"1 only in the kernel's image; node {rows[1].facts['first']} (kernel {symbol}): image" in rows[1].note


def test_kernels_added_removed_and_launched_more_often() -> None:
    count = recordings.Counter
    a = {"gone": count({"aa": 2}), "often": count({"bb": 1}), "same": count({"cc": 5})}
    b = {"new": count({"dd": 1, "ee": 2, "ff": 1, "gg": 1}), "often": count({"bb": 3}), "same": count({"cc": 5})}
    assert lines(tuple(recordings.compare_kernels(a, b))) == [
        "kernels: new: None -> ee (2 launches), dd (1 launch), ff (1 launch), 1 more images",
        "kernels: often: bb (1 launch) -> bb (3 launches)",
        "kernels: gone: aa (2 launches) -> None",
    ]


def test_two_images_of_one_symbol_that_change_places() -> None:
    def recording_of(*images: str) -> Recording:
        node = cuda_bundles.launch(0, bytes(8), ())
        functions = [Function(image=image, symbol="add", params=((0, 8),), attributes=()) for image in images]
        return Recording(key=(1,), functions=tuple(functions), nodes=(node, replace(node, function=1)), edges=())

    one, two = "1" * 64, "2" * 64
    (row,) = recordings.compare_recordings("g", recording_of(one, two), recording_of(two, one))
    assert row.note == f"2 of 2 nodes differ, 2 only in the kernel's image; node 0 (kernel add): image {one[:12]} -> {two[:12]}"


BEFORE = cuda_bundles.recording("0" * 64, 4)
"""The nodes are combine, add, memcpy, memset, empty."""


def node(number: int, **changes: Any) -> Recording:
    return relaunch(number, **changes)(BEFORE)


def _moved(number: int, at: int) -> tuple[Relocation, ...]:
    places = BEFORE.nodes[number].relocations  # type: ignore[union-attr]
    return tuple([replace(place, target=Address(memory=3, offset=64)) if place.at == at else place for place in places])


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (node(1, grid=(8, 1, 1)), "1 of 5 nodes differ; node 1 (kernel add): grid 4x1x1 -> 8x1x1"),
        (
            node(1, threads=(64, 1, 1), shared=1024),
            "1 of 5 nodes differ; node 1 (kernel add): block 32x1x1 -> 64x1x1; shared memory 0 -> 1024",
        ),
        (
            node(1, attributes=((4, (2, 1, 1)),)),
            "1 of 5 nodes differ; node 1 (kernel add): launch attributes none -> 4=2x1x1",
        ),
        (
            node(1, block=_byte(BEFORE, 1, 24, 65), relocations=_moved(1, 8)),
            "1 of 5 nodes differ; node 1 (kernel add): parameter 1 arena+0 -> arena+64; parameter 3 64 -> 65",
        ),
        (
            node(0, block=_byte(BEFORE, 0, 19, 0x41)),
            "1 of 5 nodes differ; node 0 (kernel combine): parameter 1 at byte 11 64 -> 65",
        ),
        (
            node(0, relocations=BEFORE.nodes[0].relocations[:-1]),  # type: ignore[union-attr]
            "1 of 5 nodes differ; node 0 (kernel combine): parameter 2 arena+1024 -> 0",
        ),
        (node(1, function=1), "1 of 5 nodes differ; node 1 (kernel add): kernel add -> combine"),
        (node(3, value=1), "1 of 5 nodes differ; node 3 (memset): value 1065353216 -> 1"),
        (node(3, target=Address(memory=1, offset=8)), "1 of 5 nodes differ; node 3 (memset): target arena+0 -> state+8"),
        (node(2, height=5), "1 of 5 nodes differ; node 2 (memcpy): height 4 -> 5"),
        (
            replace(BEFORE, functions=(replace(BEFORE.functions[0], attributes=((8, 4096),)), BEFORE.functions[1])),
            "1 of 5 nodes differ; node 1 (kernel add): attributes of the kernel none -> 8=4096",
        ),
        (
            replace(BEFORE, functions=(replace(BEFORE.functions[0], params=((0, 8),)), BEFORE.functions[1])),
            "1 of 5 nodes differ; node 1 (kernel add): layout of the parameters 4 in 28 bytes -> 1 in 28 bytes",
        ),
        (replace(BEFORE, edges=BEFORE.edges[1:]), "edges only in A: 1, only in B: 0"),
        (
            replace(BEFORE, edges=(*BEFORE.edges[:-1], replace(BEFORE.edges[-1], type=1))),
            "edges only in A: 1, only in B: 1",
        ),
    ],
)  # fmt: skip
def test_what_two_recordings_do(after: Recording, expected: str) -> None:
    (row,) = recordings.compare_recordings("g", BEFORE, after)
    assert row.note == expected


def test_nodes_by_kind_where_their_number_differs() -> None:
    fewer = replace(BEFORE, nodes=BEFORE.nodes[:-1], edges=())
    assert [row.note or f"{row.a} -> {row.b}" for row in recordings.compare_recordings("g", BEFORE, fewer)] == [
        "5 nodes: 2 kernel, 1 memcpy, 1 memset, 1 empty -> 4 nodes: 2 kernel, 1 memcpy, 1 memset",
        "node 4 (empty) and all later nodes: only in A",
    ]
    memset: MemsetNode = BEFORE.nodes[3]  # type: ignore[assignment]
    more = replace(BEFORE, nodes=(BEFORE.nodes[0], memset, *BEFORE.nodes[1:]), edges=())
    assert [row.note for row in recordings.compare_recordings("g", BEFORE, more)][1] == (
        "equal before node 1; node 1 (kernel add): kind kernel add -> memset"
    )


def test_the_order_of_functions_and_edges_is_no_difference() -> None:
    kernels = [replace(node, function=1 - node.function) if isinstance(node, KernelNode) else node for node in BEFORE.nodes]
    other = replace(BEFORE, nodes=tuple(kernels), functions=BEFORE.functions[::-1], edges=BEFORE.edges[::-1])
    assert list(recordings.compare_recordings("g", BEFORE, other)) == []
    assert isinstance(other.edges[0], Edge)


def test_a_recording_of_a_bundle(gpu: Path) -> None:
    record(gpu, relaunch(1, grid=(7, 1, 1)))
    (row,) = differences(MLP, gpu)
    assert (row.part, row.name, row.facts["first"], row.facts["differ"]) == ("nodes", "batch=4, model", 1, 1)
    assert "grid" in row.note and "-> 7x1x1" in row.note


def test_contents_of_modules() -> None:
    before = cuda_bundles.module_states("0" * 64)
    after = (replace(before[0], contents=bytes(4)), replace(before[1], relocations=()))
    assert lines(tuple(recordings.compare_module_states(before, after))) == [
        "module state: bias: contents 00002040 -> 00000000", "module state: table: addresses [0: weights+256] -> []",
    ]  # fmt: skip
    large = [(replace(before[0], contents=bytes(64)[:-1] + bytes([last])),) for last in (0, 1)]
    assert [row.field for row in recordings.compare_module_states(*large)] == ["contents"]
    assert [row.change for row in recordings.compare_module_states(before, before[1:])] == ["removed"]


def test_module_states_of_a_bundle(gpu: Path) -> None:
    image = sorted((gpu / "kernels").iterdir())[0].name
    (gpu / "graphs" / "modules.bin").write_bytes(encode_states(cuda_bundles.module_states(image)))
    reseal(gpu, lambda manifest: replace(manifest, module_state="graphs/modules.bin"))
    assert [(row.part, row.name, row.change) for row in differences(MLP, gpu)] == [
        ("module state", "bias", "added"),
        ("module state", "table", "added"),
    ]
    other = Path(shutil.copytree(gpu, gpu.parent / "other.cgb"))
    assert differences(gpu, other) == ()
    (other / "graphs" / "modules.bin").write_bytes(encode_states(cuda_bundles.module_states(image)[:1]))
    reseal(other)
    assert lines(differences(gpu, other)) == [
        "module state: table: bytes 8, contents 0000000000000000, addresses [0: weights+256] -> None"
    ]


def test_another_number_of_sizes_says_so_and_compares_the_common_ones(gpu: Path) -> None:
    def change(manifest: Manifest) -> Manifest:
        proofs = manifest.entries[0].self_test.proofs[:1]
        dimension = replace(manifest.entries[0].dimensions[0], sizes=(1,))
        files = tuple([file for file in manifest.files if file.path != "graphs/model-4.bin"])
        self_test = replace(manifest.entries[0].self_test, proofs=proofs)
        return edited(
            manifest, dimensions=(dimension,), programs=manifest.entries[0].programs[:1], self_test=self_test, files=files
        )

    reseal(gpu, change)
    rows = differences(MLP, gpu)
    assert {row.part for row in rows} == {"sizes", "kernels"}
    assert lines(rows)[0] == "sizes: batch: sizes [1, 4] -> [1]"
    assert all(row.change == "removed" for row in rows[1:])


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command_shows_the_parts_in_order(tiny: Path, changed: Callable[[tiny_bundle.Change], Path]) -> None:
    other = changed(lambda m: edited(m, name="other", allowed=("rule",), weights=(*m.weights[:2],)))
    result = call(tiny, other)
    assert result.exit_code == 1 and result.stderr == ""
    assert result.stdout.splitlines() == [
        f"A  {tiny}: tiny, cpu {tiny_bundle.manifest().target.arch}, built 2026-11-21T10:00:00Z",
        f"B  {other}: other, cpu {tiny_bundle.manifest().target.arch}, built 2026-11-21T10:00:00Z",
        "",
        "bundle    ~  name  tiny -> other",
        "weights   -  tied.bias  float32 [2], tensor first.bias",
        "findings  ~  allowed  only in B: rule",
    ]


def proofs(**other: Any) -> tiny_bundle.Change:
    """Returns a change that gives every proof other fields."""
    return lambda m: edited(
        m,
        self_test=replace(
            m.entries[0].self_test, proofs=tuple([replace(proof, **other) for proof in m.entries[0].self_test.proofs])
        ),
    )


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"error": 2e-07, "errors": (2e-07,)}, ["proofs  2 proofs measured other errors, all within their bounds"]),
        (
            {"error": 2e-07, "method": "interpret"},
            ["proof batch=1, and 1 more  method replay -> interpret",
             "proofs  2 proofs measured other errors, all within their bounds"],
        ),
        ({"tolerance": 0.25}, ["proof batch=1, and 1 more  tolerance 1e-05 -> 0.25"]),
        (
            {"error": 0.5, "errors": (0.5,)},
            ["proof batch=1, and 1 more  error of B is beyond its bound: 5.0e-01, allowed 1.0e-05",
             "proofs  2 proofs measured other errors"],
        ),
    ],
    ids=["measured", "method", "bound", "beyond"],
)  # fmt: skip
def test_errors_that_were_measured_are_told_once(
    other: dict[str, Any], expected: list[str], tiny: Path, changed: Callable[[tiny_bundle.Change], Path]
) -> None:
    a, b = open_bundle(str(tiny)), open_bundle(str(changed(proofs(**other))))
    rows = compare(a, b)
    assert {row.part for row in rows} == {"self-test"}
    assert [f"{row.name}  {diff._text(row)}" for row in diff._once(rows)] == expected


def test_json_has_every_error_that_was_measured(tiny: Path, changed: Callable[[tiny_bundle.Change], Path]) -> None:
    rows = json.loads(call(tiny, changed(proofs(error=2e-07)), "--json").stdout)["differences"]
    assert [(row["name"], row["field"], row["b"], row["measured"]) for row in rows] == [
        ("proof batch=1", "error", "2e-07", True),
        ("proof batch=4", "error", "2e-07", True),
    ]


def test_the_command_as_json(gpu: Path) -> None:
    reseal(gpu, lambda m: replace(m, memories=tuple([(name, size + 32 * (name == "weights")) for name, size in m.memories])))
    result = call(MLP, gpu, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["different"] and report["a"]["path"] == str(MLP) and report["b"]["name"] == "sequential"
    assert report["differences"] == [
        {
            "part": "memory", "name": "weights", "field": "", "change": "changed", "a": "2048", "b": "2080 bytes (+32)",
            "note": "", "measured": False, "facts": {"a": 2048, "b": 2080},
        }
    ]  # fmt: skip


def test_long_lists_are_cut_and_counted(tiny: Path, changed: Callable[[tiny_bundle.Change], Path]) -> None:
    other = changed(lambda m: edited(m, allowed=(), findings=tuple([finding(f"rule{n}", severity="note") for n in range(30)])))
    shown = call(tiny, other).stdout
    assert "and 18 more" in shown and "rule11" in shown and "rule12" not in shown
    assert len(json.loads(call(tiny, other, "--json").stdout)["differences"]) == 30


def test_hostile_names_cannot_drive_the_terminal(tiny: Path, changed: Callable[[tiny_bundle.Change], Path]) -> None:
    evil = "\x1b]0;owned\x07[red]\u202etxt\n"
    other = changed(lambda m: replace(m, name="[red]", provenance=replace(m.provenance, options=(("target", evil), (evil, "x")))))
    for arguments in ((tiny, other), (other, tiny, "--json")):
        shown = call(*arguments).output
        assert all(letter == "\n" or letter.isprintable() for letter in shown)
    assert r"\x1b]0;owned\x07[red]\u202etxt\n" in call(tiny, other).stdout


def refused(result: Result, code: int) -> str:
    assert result.exit_code == code and result.stdout == "", result.output
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: ") and len(rest) <= 1
    return first


def test_paths_that_are_no_bundles(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments in ((tiny, tmp_path / "missing"), (tmp_path / "missing", tiny)):
        assert f"{tmp_path / 'missing'}: no such bundle" in refused(call(*arguments), 2)
    assert "a file, not a bundle" in refused(call(tiny, tmp_path / "file"), 2)
    newer = tiny_bundle.write_bundle(tmp_path / "new.cgb", lambda manifest: edited(manifest, version=VERSION + 1))
    assert f"{newer}: version: the bundle has version {VERSION + 1} of the format" in refused(call(tiny, newer), 2)
    assert call(tiny).exit_code == 2


def test_damage_is_one_line_with_the_bundle(tiny: Path, gpu: Path, tmp_path: Path) -> None:
    other = tiny_bundle.write_bundle(tmp_path / "other.cgb")
    (other / file_names.PROGRAM).unlink()
    assert f"{other}: program.pt2: missing" in refused(call(tiny, other), 1)
    (other / file_names.MANIFEST).write_bytes(b"{}")
    assert f"{other}: version: expected" in refused(call(other, tiny), 1)
    table = gpu / "graphs" / "model-4.bin"
    record(gpu, relaunch(0, grid=(9, 1, 1)))
    data = bytearray(table.read_bytes())
    data[-1] ^= 1
    table.write_bytes(data)
    assert f"{gpu}: graphs/model-4.bin: SHA-256" in refused(call(MLP, gpu), 1)
    reseal(gpu)
    table.write_bytes(b"not a table at all")
    reseal(gpu)
    assert f"{gpu}: graphs/model-4.bin: begins with" in refused(call(MLP, gpu), 1)


def test_a_weights_file_without_a_tensor(tiny: Path, tmp_path: Path) -> None:
    other = tiny_bundle.write_bundle(tmp_path / "other.cgb")
    weigh(other, {"first.weight": ("float32", (2, 3), tiny_bundle.floats(range(6)))})
    assert f"{other}: weights.safetensors: tensor 'first.bias' is missing" in refused(call(tiny, other), 1)


def test_neither_torch_nor_a_gpu_is_asked_for() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'numpy', 'cuda')));"
        f"from cgcompile_cli.main import app; app(['diff', {str(MLP)!r}, {str(MLP)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=_paths())
    assert (done.returncode, done.stdout, done.stderr) == (0, "no difference\n", "")


def _paths() -> dict[str, str]:
    root = ROOT
    return {"PYTHONPATH": ":".join([str(root / folder) for folder in (".", "cli", "bundles")])}


def test_help_fits_80_columns() -> None:
    shown = call("--help").stdout
    assert max(map(len, shown.splitlines())) <= 80 and shown.isascii()
