"""One test for each invariant of a manifest: a valid manifest with exactly one defect is refused with the path of the defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.format import file_names, limits, manifest_json
from cgbundle.format.archive import Archive
from cgbundle.format.schema import MEMORIES, File, Finding, Lowering, Manifest, Parameter, Region, Step, TensorSpec, Value
from cgbundle.format.shapes import operands
from cgbundle.validate import bundle, contents
from cgbundle.validate.contents import check_tables
from cgbundle.validate.manifest import check_manifest
from cgbundle.validate.module_state import ModuleState
from cgbundle.validate.programs import check_size_evaluations
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import MemsetNode, encode_states
from tests.helpers.bundles import cuda_bundles, donation_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.edits import OF_ENTRY, edited, located
from tests.helpers.bundles.fabricate import dimension, signature, spec
from tests.helpers.bundles.tiny_bundle import HOST_FILE, manifest
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

Change = Callable[[Manifest], Manifest]

SHA = "ab" * 32
FILES = tuple(
    File(path=path, bytes=1, sha256=SHA) for path in (file_names.SELF_TEST, HOST_FILE, file_names.PROGRAM, file_names.WEIGHTS)
)
TABLES = tuple(File(path=f"graphs/{name}-{size}.bin", bytes=1, sha256=SHA) for name in ("g0", "g1") for size in (1, 4))


def cpu() -> Manifest:
    return replace(manifest(), files=FILES)


def cuda() -> Manifest:
    """Returns a manifest with, for each key, a graph step on x, a host step between two copies, and a graph step for y."""
    base = cpu()

    def program(size: int) -> Any:
        def value(memory: str, offset: int, width: int) -> Value:
            return Value(dtype="float32", shape=(size, width), strides=(width, 1), memory=memory, offset=offset)

        return replace(
            base.entries[0].programs[0],
            key=(size,),
            values=(
                value("inputs", 0, 3),
                value("arena", 0, 2),
                value("host", 0, 2),
                value("host", 32, 2),
                value("arena", 32, 2),
                value("arena", 64, 2),
            ),
            inputs=(0,),
            outputs=(5,),
            steps=(
                Step(kind="graph", region=0, file=f"graphs/g0-{size}.bin", inputs=(0,), outputs=(1,)),
                Step(kind="copy", region=0, file="", inputs=(1,), outputs=(2,)),
                Step(kind="host", region=1, file="", inputs=(2,), outputs=(3,)),
                Step(kind="copy", region=0, file="", inputs=(3,), outputs=(4,)),
                Step(kind="graph", region=2, file=f"graphs/g1-{size}.bin", inputs=(1, 4), outputs=(5,)),
            ),
            arena=96,
            static=48,
        )

    return edited(
        base,
        target=replace(base.target, kind="cuda", arch="sm_90", driver=13000),
        weights=(base.weights[0], replace(base.weights[1], offset=256)),
        memories=(("weights", 512), ("inputs", 256), ("arena", 96), ("host", 64)),
        regions=(
            Region(name="g0", kind="graph", reason="", file="", constants=()),
            replace(base.regions[0], constants=(("c0", 0),)),
            Region(name="g1", kind="graph", reason="", file="", constants=()),
        ),
        programs=tuple(map(program, (1, 4))),
        files=(*FILES, *TABLES),
    )


def reject(broken: Manifest, path: str, message: str = "") -> None:
    with raises("manifest-invalid") as caught:
        check_manifest(manifest_json.decode(manifest_text.encode(broken)))
    assert str(caught.value).startswith(f"{located(path)}") and message in str(caught.value)
    assert str(caught.value).isprintable()


def parameter(keyword: bool, default: dict[str, Any] | None = None) -> Parameter:
    return Parameter(keyword=keyword, default=default)


def put(**changes: Any) -> Change:
    """Returns a change of fields of the manifest."""
    return lambda manifest: edited(manifest, **changes)


def put_row(field: str, index: int, **changes: Any) -> Change:
    """Returns a change of fields in one row of a table of the manifest."""

    def change(manifest: Manifest) -> Manifest:
        rows = list(getattr(manifest.entries[0] if field in OF_ENTRY else manifest, field))
        rows[index] = replace(rows[index], **changes)
        return edited(manifest, **{field: tuple(rows)})

    return change


def put_value(index: int, **changes: Any) -> Change:
    """Returns a change of a value of the second program."""

    def change(manifest: Manifest) -> Manifest:
        values = list(manifest.entries[0].programs[1].values)
        values[index] = replace(values[index], **changes)
        return put_row("programs", 1, values=tuple(values))(manifest)

    return change


def put_step(index: int, **changes: Any) -> Change:
    """Returns a change of a step of the second program."""

    def change(manifest: Manifest) -> Manifest:
        steps = list(manifest.entries[0].programs[1].steps)
        steps[index] = replace(steps[index], **changes)
        return put_row("programs", 1, steps=tuple(steps))(manifest)

    return change


def test_the_manifests_of_these_tests_are_sound() -> None:
    check_manifest(cpu())
    check_manifest(cuda())


X = manifest().entries[0].inputs[0]
DIMENSION = manifest().entries[0].dimensions[0]

BROKEN: list[tuple[str, Change, str, str]] = [
    # dimensions
    ("a dimension twice", put(dimensions=(DIMENSION, DIMENSION)), "dimensions", "a name occurs twice"),
    ("a dimension with no name", put_row("dimensions", 0, name="two words"), "dimensions[0].name", "'two words' is no name"),
    ("a dimension without sizes", put_row("dimensions", 0, sizes=()), "dimensions[0].sizes", "no size"),
    ("sizes that fall", put_row("dimensions", 0, sizes=(4, 1)), "dimensions[0].sizes", "not ascending"),
    ("a size twice", put_row("dimensions", 0, sizes=(1, 1, 4)), "dimensions[0].sizes", "not ascending"),
    ("a size of 0", put_row("dimensions", 0, sizes=(0, 4)), "dimensions[0].sizes", "0 is below 1"),
    ("an unknown padding", put_row("dimensions", 0, pad="maybe"), "dimensions[0].pad", "expected one of rows, zeros, no"),
    ("a dimension of no input", put_row("inputs", 0, shape=(4, 3)), "dimensions", "batch is the size of no input's axis"),
    # signature
    ("an input twice", put(inputs=(X, X)), "inputs", "a name occurs twice"),
    ("an unknown dtype", put_row("inputs", 0, dtype="float33"), "inputs[0].dtype", "expected one of float64"),
    ("an order of other axes", put_row("inputs", 0, order=(0, 2)), "inputs[0].order", "is not an order of the axes"),
    ("an order of too few axes", put_row("outputs", 0, order=(0,)), "outputs[0].order", "is not an order of the axes"),
    ("an unknown dimension", put_row("outputs", 0, shape=("seq", 2)), "outputs[0].shape[0]", "unknown dimension ['seq']"),
    (
        "a hidden unknown",
        put_row("outputs", 0, shape=(("+", "batch", ("*", "seq", 0)), 2)),
        "outputs[0].shape[0]",
        "unknown dimension",
    ),
    (
        "an input's size to solve",
        put_row("inputs", 0, shape=(("//", "batch", 2), 3)),
        "inputs[0].shape[0]",
        "scale * dimension + offset",
    ),
    (
        "an output that cannot be joined",
        put_row("outputs", 0, shape=(4, 2)),
        "dimensions[0].chunk",
        "outputs[0] cannot be chunked along batch",
    ),
    (
        "an output with a rest",
        put_row("outputs", 0, shape=(("+", "batch", 1), 2)),
        "dimensions[0].chunk",
        "outputs[0] cannot be chunked",
    ),
    (
        "an output of halves",
        put_row("outputs", 0, shape=(("//", "batch", 2), 2)),
        "dimensions[0].chunk",
        "outputs[0] cannot be chunked",
    ),
    ("an output cut twice", put_row("outputs", 0, shape=("batch", "batch")), "dimensions[0].chunk", "outputs[0] cannot be chunked"),
    ("an input with a rest", put_row("inputs", 0, shape=(("+", "batch", 1), 3)), "dimensions[0].chunk", "inputs[0] cannot be"),
    ("no call", put(call={"tensor": 0}), "call", "is not the structure of a call"),
    ("a call of other tensors", put(call={"call": []}), "call", "expected each of 1 once"),
    ("a result of other tensors", put(result={"tuple": [{"tensor": 0}, {"tensor": 1}]}), "result", "expected each of 1 once"),
    ("a result that is a call", put(result={"call": [["x", {"tensor": 0}]]}), "result", "is no structure"),
    # target, memories, weights
    ("an unknown target", put(target=replace(manifest().target, kind="tpu")), "target.kind", "expected one of cpu, cuda"),
    ("no architecture", put(target=replace(manifest().target, arch="")), "target.arch", "empty"),
    ("a weight that calls change", put(mutated_buffers=(0,)), "mutated_buffers", "are not ascending weights of memory state"),
    ("an unknown memory", put(memories=(("weights", 32), ("heap", 1))), "memories", "unknown or double name"),
    ("a memory twice", put(memories=(("weights", 32), ("weights", 32))), "memories", "unknown or double name"),
    ("a memory below nothing", put(memories=(("weights", -1),)), "memories[0][1]", "-1 is below 0"),
    ("a weight twice", put_row("weights", 1, name="first.weight"), "weights", "a name occurs twice"),
    ("a weight's dtype", put_row("weights", 0, dtype="f32"), "weights[0].dtype", "expected one of float64"),
    ("strides of another rank", put_row("weights", 0, strides=(1,)), "weights[0].strides", "do not match the shape"),
    ("a negative stride", put_row("weights", 0, strides=(3, -1)), "weights[0]", "negative size or stride"),
    ("a negative size", put_row("weights", 0, shape=(2, -3)), "weights[0]", "negative size or stride"),
    ("a weight with gaps", put_row("weights", 0, strides=(4, 1)), "weights[0].strides", "leave gaps or overlap"),
    ("a weight that overlaps", put_row("weights", 0, strides=(0, 1)), "weights[0].strides", "leave gaps or overlap"),
    ("a weight that does both", put_row("weights", 0, strides=(5, 0)), "weights[0].strides", "leave gaps or overlap"),
    ("a weight at a place of its own", put_row("weights", 0, offset=256), "weights[0].offset", "lies where the file has it"),
    ("more memory than weights", put(memories=(("weights", 33),)), "memories", "the weights make {'weights': 32}"),
    ("less memory than weights", put(memories=(("weights", 31),)), "memories", "the weights make {'weights': 32}"),
    ("memory for nothing", put(memories=(("weights", 32), ("arena", 64))), "memories", "the weights make {'weights': 32}"),
    ("no memory for weights", put(memories=()), "memories", "the weights make {'weights': 32}"),
    (
        "a tensor of no weight",
        put_row("weights", 0, tensor="x"),
        "weights[0].tensor",
        "'x' is the name of no weight that lies there",
    ),
    ("a tied weight as an owner", put_row("weights", 0, tensor="tied.bias"), "weights[0].tensor", "is the name of no weight"),
    (
        "weights with each other's tensors",
        lambda base: put_row("weights", 0, tensor="first.bias")(put_row("weights", 1, tensor="first.weight")(base)),
        "weights[0].tensor",
        "'first.bias' is the name of no weight that lies there",
    ),
    ("a tied weight's dtype", put_row("weights", 2, dtype="int32"), "weights[2]", "laid out otherwise than 'first.bias'"),
    ("a tied weight's shape", put_row("weights", 2, shape=(1,)), "weights[2]", "laid out otherwise than 'first.bias'"),
    ("a tied weight's strides", put_row("weights", 2, shape=(2, 1), strides=(1, 9)), "weights[2]", "laid out otherwise"),
    # regions
    ("an unknown region", put_row("regions", 0, kind="loop"), "regions[0].kind", "expected one of graph, host"),
    ("a host region without a file", put_row("regions", 0, file=""), "regions[0].file", "a host region has a file"),
    ("a graph region with a file", put_row("regions", 0, kind="graph"), "regions[0].file", "a graph region none"),
    ("a constant of no weight", put_row("regions", 0, constants=(("c", 0), ("d", 3))), "regions[0].constants[1]", "no weight 3"),
    ("a constant below 0", put_row("regions", 0, constants=(("c", -1),)), "regions[0].constants[0]", "no weight -1"),
    ("a constant twice", put_row("regions", 0, constants=(("c", 0), ("c", 1))), "regions[0].constants", "a name occurs twice"),
    # programs
    (
        "a program missing",
        lambda base: edited(base, programs=base.entries[0].programs[:1]),
        "programs",
        "1, the dimensions' sizes make 2",
    ),
    (
        "programs turned round",
        lambda base: edited(base, programs=base.entries[0].programs[::-1]),
        "programs",
        "are not the product",
    ),
    ("a key of another rank", put_row("programs", 1, key=(4, 1)), "programs", "are not the product"),
    ("a value's dtype", put_value(0, dtype="f32"), "programs[1].values[0].dtype", "expected one of float64"),
    ("a value's memory", put_value(0, memory="heap"), "programs[1].values[0].memory", "expected one of weights"),
    ("a value's rank", put_value(0, strides=(1,)), "programs[1].values[0].strides", "do not match the shape"),
    ("a value below nothing", put_value(0, shape=(-4, 3)), "programs[1].values[0]", "negative size or stride"),
    ("a value that ends past 64 bits", put_value(0, strides=(2**62, 1)), "programs[1].values[0]", "more bytes than 64 bits count"),
    (
        "a value with too many elements",
        put_value(0, shape=(2**62, 3), strides=(0, 0)),
        "programs[1].values[0]",
        "more bytes than 64 bits count",
    ),
    ("an offset in host memory", put_value(0, offset=4), "programs[1].values[0].offset", "a value in host memory has none"),
    (
        "a cpu value elsewhere",
        put_value(1, memory="weights"),
        "programs[1].values[1].memory",
        "of the cpu target in memory weights",
    ),
    (
        "a cpu value that the call does not have",
        lambda base: put_row("programs", 1, values=(*base.entries[0].programs[1].values, base.entries[0].programs[1].values[0]))(
            base
        ),
        "programs[1].values",
        "each is one input or one output of the call",
    ),
    ("too few inputs", put_row("programs", 1, inputs=()), "programs[1].inputs", "0 values, the signature has 1"),
    ("too many outputs", put_row("programs", 1, outputs=(1, 1)), "programs[1].outputs", "2 values, the signature has 1"),
    ("an input that is no value", put_row("programs", 1, inputs=(2,)), "programs[1].inputs[0]", "no value 2"),
    ("an input below 0", put_row("programs", 1, inputs=(-1,)), "programs[1].inputs[0]", "no value -1"),
    ("an input of another dtype", put_value(0, dtype="int32"), "programs[1].inputs[0]", "dtype int32, the signature has float32"),
    ("an output of another dtype", put_value(1, dtype="int32"), "programs[1].outputs[0]", "dtype int32, the signature has float32"),
    ("an input of another shape", put_value(0, shape=(5, 3)), "programs[1].inputs[0]", "shape [5, 3], the signature gives [4, 3]"),
    (
        "an output of another shape",
        put_value(1, shape=(4, 3)),
        "programs[1].outputs[0]",
        "shape [4, 3], the signature gives [4, 2]",
    ),
    ("an input in another order", put_value(0, strides=(1, 4)), "programs[1].inputs[0]", "strides [1, 4] are not those of"),
    ("an input with gaps", put_value(0, strides=(8, 1)), "programs[1].inputs[0]", "strides [8, 1] are not those of"),
    ("more arena than there is", put_row("programs", 1, arena=1), "programs[1].arena", "1 bytes, memory arena has less"),
    ("an arena below nothing", put_row("programs", 1, arena=-1), "programs[1].arena", "-1 is below 0"),
    ("more static memory than there is", put_row("programs", 1, static=1), "programs[1].static", "1 bytes, memory inputs has less"),
    ("no step", put_row("programs", 1, steps=()), "programs[1].steps", "no step"),
    ("an unknown step", put_step(0, kind="jump"), "programs[1].steps[0].kind", "expected one of graph, host, copy"),
    ("a step over no value", put_step(0, inputs=(2,)), "programs[1].steps[0]", "no such value"),
    ("a step to no value", put_step(0, outputs=(-1,)), "programs[1].steps[0]", "no such value"),
    (
        "a host step with a table",
        put_step(0, file="graphs/g1.bin"),
        "programs[1].steps[0].file",
        "a graph step has a table, others none",
    ),
    ("a step of no region", put_step(0, region=1), "programs[1].steps[0].region", "no region 1"),
    ("a step of a region below 0", put_step(0, region=-1), "programs[1].steps[0].region", "no region -1"),
    ("a cpu program over other values", put_step(0, inputs=()), "programs[1].steps", "one host step over the call's values"),
    (
        "a cpu program of two steps",
        lambda base: put_row("programs", 1, steps=base.entries[0].programs[1].steps * 2)(base),
        "programs[1].steps",
        "one host step over the call's values",
    ),
    # self-test and findings
    (
        "a self-test of other keys",
        put(self_test=replace(manifest().entries[0].self_test, proofs=())),
        "self_test.proofs",
        "do not match the programs",
    ),
    ("a bound too few", put(self_test=replace(manifest().entries[0].self_test, bounds=())), "self_test.bounds", "0 for 1 tensors"),
    (
        "a negative bound",
        put(self_test=replace(manifest().entries[0].self_test, bounds=(-1.0,))),
        "self_test.bounds[0]",
        "-1.0 is below 0",
    ),
    (
        "an unknown source of the self-test",
        put(self_test=replace(manifest().entries[0].self_test, expected="luck")),
        "self_test.expected",
        "expected one of eager, recording",
    ),
    ("no parameters", put(parameters=()), "parameters", "are not those of the call"),
    (
        "a tensor for a default",
        put(parameters=(parameter(False, {"tensor": 0}),)),
        "parameters[0].default",
        "names the tensors '0'",
    ),
    ("a default of no kind", put(parameters=(parameter(False, {"set": []}),)), "parameters[0].default", "'set' is no structure"),
    (
        "one by position behind one by name",
        put(call={"call": [["a", {"value": 1}], ["x", {"tensor": 0}]]}, parameters=(parameter(True), parameter(False))),
        "parameters[1].keyword",
        "a parameter by position follows one by name",
    ),
    (
        "an unknown comparison",
        put(self_test=replace(manifest().entries[0].self_test, compare="looks")),
        "self_test.compare",
        "expected one of bits, tolerance",
    ),
    (
        "an unknown finding",
        put(findings=(Finding(rule="r", severity="maybe", message=""),)),
        "findings[0].severity",
        "expected one of refuse, host, note",
    ),
    # files
    ("a file twice", put(files=(*FILES, FILES[0])), "files", "a path occurs twice"),
    ("a file below nothing", put_row("files", 0, bytes=-1), "files[0].bytes", "-1 is below 0"),
    ("a short hash", put_row("files", 0, sha256="ab"), "files[0].sha256", "is no SHA-256"),
    ("a hash in capitals", put_row("files", 0, sha256="AB" * 32), "files[0].sha256", "is no SHA-256"),
    (
        "a kernel under another name",
        put(files=(*FILES, File(path="kernels/" + "cd" * 32, bytes=1, sha256=SHA))),
        "files[4].path",
        "a kernel image is not named by its SHA-256",
    ),
]


@pytest.mark.parametrize(("change", "path", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_refused(change: Change, path: str, message: str) -> None:
    reject(change(cpu()), path, message)


def two_inputs(offset: int, inputs: tuple[int, int] = (0, 6)) -> Manifest:
    """Returns the CUDA manifest with a second input at `offset` of memory inputs."""
    manifest = cuda()
    programs = [
        replace(program, values=(*program.values, replace(program.values[0], offset=offset)), inputs=inputs, static=256)
        for program in manifest.entries[0].programs
    ]
    specs = (*manifest.entries[0].inputs, replace(manifest.entries[0].inputs[0], name="z"))
    call = {"call": [["x", {"tensor": 0}], ["z", {"tensor": 1}]]}
    return edited(manifest, inputs=specs, call=call, parameters=manifest.entries[0].parameters * 2, programs=tuple(programs))


def test_the_inputs_of_a_call_lie_beside_each_other() -> None:
    check_manifest(two_inputs(48))
    reject(two_inputs(44), "programs[1].inputs[1]", "lies over another input of the call")
    reject(two_inputs(0), "programs[0].inputs[1]", "lies over another input of the call")
    reject(two_inputs(48, inputs=(0, 0)), "programs[0].inputs", "a value occurs twice")


def test_an_input_without_elements_may_lie_anywhere_and_others_in_memory_inputs() -> None:
    base = two_inputs(48)

    def second(spec: Any, **changes: Any) -> Manifest:
        programs = [
            replace(program, values=(*program.values[:6], replace(program.values[6], **changes)))
            for program in base.entries[0].programs
        ]
        return edited(base, inputs=(base.entries[0].inputs[0], spec), programs=tuple(programs))

    empty = replace(base.entries[0].inputs[1], shape=(0,), order=(0,))
    for memory in ("arena", "state"):  # there is no memory state
        check_manifest(second(empty, shape=(0,), strides=(1,), memory=memory, offset=0))
    reject(
        second(base.entries[0].inputs[1], memory="arena", offset=0), "programs[0].inputs[1]", "lies in memory arena, not in inputs"
    )
    with_empty = second(empty, shape=(0,), strides=(1,))
    turned = [replace(program, inputs=(6, 0)) for program in with_empty.entries[0].programs]
    moved = replace(turned[0], values=(replace(turned[0].values[0], memory="arena"), *turned[0].values[1:]))
    behind = edited(with_empty, inputs=with_empty.entries[0].inputs[::-1], programs=(moved, *turned[1:]))
    reject(behind, "programs[0].inputs[1]", "lies in memory arena, not in inputs")


def test_a_weight_for_the_host_may_be_one_tensor_with_one_on_the_gpu() -> None:
    manifest = cuda()
    tied = replace(manifest.weights[1], name="tied", memory="host", offset=0)
    host = replace(manifest.regions[1], constants=(("c0", 2),))
    check_manifest(replace(manifest, weights=(*manifest.weights, tied), regions=(manifest.regions[0], host, manifest.regions[2])))


def tried(**changes: Any) -> Change:
    """Returns a change that gives the second program three lowerings, the first of which has `changes`."""
    rows = [
        Lowering(name="eager", chosen=True, microseconds=(4.0, 1.5), reason=""),
        Lowering(name="inductor", chosen=False, microseconds=(5.0, 1.5), reason=""),
        Lowering(name="cross-compile", chosen=False, microseconds=(), reason="no kernel"),
    ]
    return put_row("programs", 1, lowerings=(replace(rows[0], **changes), *rows[1:]))


def test_what_was_tried_is_sound() -> None:
    check_manifest(tried()(cuda()))
    check_manifest(tried(microseconds=(0.0, 0.5))(cuda()))


def test_every_lowering_is_checked() -> None:
    eager, inductor, traced = tried()(cuda()).entries[0].programs[1].lowerings
    for rows, path, message in (
        ((eager, replace(traced, microseconds=(1.0, 2.0))), "[1]", "it has a reason why it was left out, and was not"),
        ((traced, eager, replace(inductor, microseconds=(1.0, -2.0))), "[2].microseconds", "a negative time"),
    ):
        reject(put_row("programs", 1, lowerings=rows)(cuda()), f"programs[1].lowerings{path}", message)


BROKEN_CUDA: list[tuple[str, Change, str, str]] = [
    ("a lowering twice", tried(name="cross-compile"), "programs[1].lowerings", "a name occurs twice"),
    ("no lowering chosen", tried(chosen=False), "programs[1].lowerings", "0 are chosen"),
    ("a time too many", tried(microseconds=(1.0, 2.0, 3.0)), "programs[1].lowerings[0].microseconds", "has 2 graph steps"),
    ("no time and no reason", tried(microseconds=()), "programs[1].lowerings[0].microseconds", "0 times"),
    ("a negative time", tried(microseconds=(1.0, -2.0)), "programs[1].lowerings[0].microseconds", "a negative time"),
    ("a reason of the chosen", tried(microseconds=(), reason="no"), "programs[1].lowerings[0]", "and was not"),
    ("a weight off its alignment", put_row("weights", 1, offset=128), "weights[1].offset", "is not aligned"),
    ("a weight outside its memory", put_row("weights", 1, offset=512), "weights[1].offset", "outside memory weights"),
    ("a weight before its memory", put_row("weights", 1, offset=-256), "weights[1].offset", "-256 is below 0"),
    ("a weight that nobody uses", put_row("weights", 1, memory="host", offset=0), "weights[1].memory", "no host region uses it"),
    ("a weight in another's place", put_row("weights", 1, offset=0), "weights[0].offset", "overlaps another weight"),
    (
        "a tied weight elsewhere",
        lambda base: replace(base, weights=(*base.weights, replace(base.weights[1], name="tied", offset=0))),
        "weights[2].offset",
        "lies elsewhere than 'first.bias'",
    ),
    ("regions of one file", lambda base: replace(base, regions=(*base.regions, base.regions[1])), "regions", "one shared object"),
    (
        "a value behind its arena",
        put_row("programs", 1, arena=95),
        "programs[1].values[5].offset",
        "the program's 95 bytes of memory arena",
    ),
    (
        "an input behind its memory",
        put_row("programs", 1, static=47),
        "programs[1].values[0].offset",
        "the program's 47 bytes of memory inputs",
    ),
    ("an input in the arena", put_value(0, memory="arena"), "programs[1].inputs[0]", "lies in memory arena, not in inputs"),
    ("a value behind the arena", put_value(1, offset=68), "programs[1].values[1].offset", "outside memory arena"),
    ("a value before the arena", put_value(1, offset=-4), "programs[1].values[1].offset", "outside memory arena"),
    ("a value in no memory", put_value(1, memory="state"), "programs[1].values[1].offset", "outside memory state"),
    ("strides beyond the arena", put_value(1, strides=(100, 1)), "programs[1].values[1].offset", "outside memory arena"),
    ("a value behind memory host", put_value(3, offset=36), "programs[1].values[3].offset", "outside memory host"),
    ("a value before memory host", put_value(3, offset=-4), "programs[1].values[3].offset", "outside memory host"),
    ("host regions without torch", put(target=replace(cuda().target, torch="")), "target.torch", "empty"),
    ("a shared object anywhere", put_row("regions", 1, file="kernels/model.so"), "regions[1].file", "outside host/"),
    ("a graph step without a table", put_step(0, file=""), "programs[1].steps[0].file", "a graph step has a table"),
    ("a copy with a table", put_step(1, file="graphs/g0-1.bin"), "programs[1].steps[1].file", "others none"),
    ("a copy of two values", put_step(1, inputs=(1, 2)), "programs[1].steps[1]", "one input and one output"),
    ("a copy to nowhere", put_step(1, outputs=()), "programs[1].steps[1]", "one input and one output"),
    ("a copy of another shape", put_step(1, inputs=(0,)), "programs[1].steps[1]", "different layouts"),
    ("a copy of another dtype", put_value(2, dtype="int32"), "programs[1].steps[1]", "different layouts"),
    ("a copy with other strides", put_value(2, strides=(1, 4)), "programs[1].steps[1]", "different layouts"),
    ("a graph step of a host region", put_step(0, region=1), "programs[1].steps[0].region", "is of another kind"),
    ("a host step of a graph region", put_step(2, region=0), "programs[1].steps[2].region", "is of another kind"),
    # where the values of steps are
    ("an input of the call on the host", put_value(0, memory="host"), "programs[1].inputs[0]", "lies in memory host"),
    ("an output of the call on the host", put_row("programs", 1, outputs=(3,)), "programs[1].outputs[0]", "lies in memory host"),
    ("a copy on the host", put_step(1, inputs=(3,)), "programs[1].steps[1]", "a copy from host to host"),
    (
        "a host step that reads the arena",
        put_step(2, inputs=(1,)),
        "programs[1].steps[2]",
        "over value 1, which lies in memory arena",
    ),
    (
        "a host step that writes the arena",
        put_step(2, outputs=(5,)),
        "programs[1].steps[2]",
        "over value 5, which lies in memory arena",
    ),
    ("a graph step that reads the host", put_step(4, inputs=(3,)), "programs[1].steps[4]", "a graph step over value 3"),
    ("a graph step that writes the host", put_step(4, outputs=(3,)), "programs[1].steps[4]", "a graph step over value 3"),
    # the order of steps
    ("a step before its input", put_step(0, inputs=(4,)), "programs[1].steps[0]", "reads value 4, which nothing has written"),
    ("a step that reads its own output", put_step(4, inputs=(5,)), "programs[1].steps[4]", "reads value 5, which nothing"),
    ("an output that no step writes", put_step(4, outputs=()), "programs[1].outputs[0]", "value 5, which nothing has written"),
    ("a value written twice", put_step(4, outputs=(1, 5)), "programs[1].steps[4]", "writes value 1, which steps[0] has written"),
    ("a step that writes an input", put_step(4, outputs=(0, 5)), "programs[1].steps[4]", "writes value 0, an input of the call"),
    (
        "a copy over an input",
        put_value(4, memory="inputs", offset=0),
        "programs[1].steps[3]",
        "copies over value 0, an input of the call",
    ),
    ("a copy into the weights", put_value(4, memory="weights"), "programs[1].steps[3]", "copies into memory weights"),
    # lifetimes
    (
        "a value over one still to be read",
        put_value(4, offset=0),
        "programs[1].steps[3]",
        "writes value 4 over value 1, which steps[4] reads",
    ),
]


@pytest.mark.parametrize(("change", "path", "message"), [row[1:] for row in BROKEN_CUDA], ids=[row[0] for row in BROKEN_CUDA])
def test_refused_for_cuda(change: Change, path: str, message: str) -> None:
    reject(change(cuda()), path, message)


def test_a_level_is_one_of_processors() -> None:
    check_manifest(replace(cpu(), target=replace(cpu().target, level="x86-64-v3")))
    reject(replace(cuda(), target=replace(cuda().target, level="x86-64-v3")), "target.level", "a bundle for a GPU has none")


@pytest.mark.parametrize(
    ("field", "value"),
    [("method", "guess"), ("tolerance", -1.0), ("error", -1.0), ("errors", (-1.0,)), ("errors", (0.0, 0.0)), ("distance", 0.1)],
)
def test_every_proof_is_a_proof(field: str, value: object) -> None:
    manifest = cpu()
    proofs = (manifest.entries[0].self_test.proofs[0], replace(manifest.entries[0].self_test.proofs[1], **{field: value}))
    reject(edited(manifest, self_test=replace(manifest.entries[0].self_test, proofs=proofs)), f"self_test.proofs[1].{field}")


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "..", "../x", "a/../b", "a//b", "a/", "./a", "a\\b", "a\nb", "a\0b", "\x1b[2J", "manifest.json", "\ud800"],
)
def test_a_file_lies_inside_the_bundle_under_a_plain_name(path: str) -> None:
    reject(
        put(files=(*FILES, File(path=path, bytes=1, sha256=SHA)))(cpu()),
        "files[4].path",
        "is no path inside the bundle" if path.isprintable() else "is not printable",
    )


@pytest.mark.parametrize("path", [file_names.WEIGHTS, file_names.SELF_TEST, file_names.PROGRAM, HOST_FILE])
def test_a_file_that_is_needed_is_listed(path: str) -> None:
    manifest = cpu()
    with raises("file-damaged", match=f"^{path}: the manifest needs it and does not list it"):
        check_manifest(replace(manifest, files=tuple(file for file in manifest.files if file.path != path)))


def test_programs_of_their_own_are_needed_for_every_int_key() -> None:
    manifest = cpu()
    rest = tuple([file for file in manifest.files if file.path != file_names.PROGRAM])
    rows = tuple([File(path=file_names.program_file(program.key), bytes=1, sha256=SHA) for program in manifest.entries[0].programs])
    whole = replace(manifest, files=tuple(sorted((*rest, *rows), key=lambda file: file.path)))
    check_manifest(whole)
    assert (
        file_names.per_size(whole, whole.entries[0])
        and not file_names.per_size(manifest, manifest.entries[0])
        and file_names.program_files(manifest) == (file_names.PROGRAM,)
    )
    with raises("file-damaged", match=f"^{rows[0].path}: the manifest needs it and does not list it"):
        check_manifest(replace(whole, files=tuple([file for file in whole.files if file.path != rows[0].path])))


def test_tables_and_module_states_are_listed() -> None:
    with raises("file-damaged", match=r"^graphs/g1-4\.bin: "):
        check_manifest(replace(cuda(), files=(*FILES, *TABLES[:3])))
    with raises("file-damaged", match=f"^{HOST_FILE}: "):
        check_manifest(replace(cuda(), files=(*[file for file in FILES if file.path != HOST_FILE], *TABLES)))
    with raises("file-damaged", match=r"^graphs/modules\.bin: "):
        check_manifest(replace(cuda(), module_state="graphs/modules.bin"))


def test_a_kernel_image_is_named_by_its_hash() -> None:
    check_manifest(replace(cpu(), files=(*FILES, File(path=f"kernels/{SHA}", bytes=1, sha256=SHA))))


def test_a_weight_may_lie_in_any_order_of_its_axes() -> None:
    check_manifest(put_row("weights", 0, strides=(1, 2))(cpu()))
    check_manifest(put_row("weights", 0, shape=(1, 0, 3), strides=(9, 9, 9))(replace(cpu(), memories=(("weights", 8),))))
    check_manifest(put_row("weights", 0, shape=(1, 6), strides=(77, 1))(cpu()))


def test_an_axis_of_size_one_may_have_any_stride() -> None:
    values = (replace(cpu().entries[0].programs[0].values[0], strides=(99, 1)), cpu().entries[0].programs[0].values[1])
    check_manifest(put_row("programs", 0, values=values)(cpu()))


def test_a_shape_that_divides_by_zero_is_refused() -> None:
    manifest = put_row("dimensions", 0, chunk=False)(cpu())
    broken = put_row("outputs", 0, shape=(("//", "batch", ("-", "batch", 1)), 2))(manifest)
    reject(broken, "programs[0].outputs[0]", "divides by zero at {'batch': 1}")


def test_a_product_of_sizes_that_nobody_could_list_is_refused_at_once() -> None:
    dimensions = [dimension(f"d{index}", *range(1, 100)) for index in range(12)]
    inputs = [spec("x", *[axis.name for axis in dimensions])]
    small = signature([replace(axis, sizes=(1,)) for axis in dimensions], inputs, [spec("y", *[axis.name for axis in dimensions])])
    check_manifest(replace(small, files=FILES))
    reject(edited(small, files=FILES, dimensions=tuple(dimensions)), "programs", "1, the dimensions' sizes make")


def test_sizes_that_are_multiples_of_a_dimension_are_cut() -> None:
    manifest = signature(
        [dimension("batch", 2, 4)],
        [spec("x", ("*", "batch", 2), 3), TensorSpec(name="table", dtype="float32", shape=(7,), order=(0,))],
        [spec("y", 3, ("*", 4, "batch"))],
    )
    check_manifest(replace(manifest, files=FILES))


# --- tables ----------------------------------------------------------------------------------------------------------


def recorded(folder: Path) -> Manifest:
    """Writes a bundle of recordings with an invalid image, for checks only."""
    return cuda_bundles.write(folder, b"an image")


def test_tables_and_module_states_are_checked(tmp_path: Path) -> None:
    check_tables(ArchiveOf(tmp_path, recorded(tmp_path)))


def test_a_table_of_another_key_is_refused(tmp_path: Path) -> None:
    manifest = recorded(tmp_path)
    first, second = manifest.entries[0].programs
    swapped = edited(manifest, programs=(replace(first, steps=second.steps), replace(second, steps=first.steps)))
    with raises("table-invalid", match=r"^graphs/g0-8\.bin: key: \(8,\), the manifest uses it for \(4,\)"):
        check_tables(ArchiveOf(tmp_path, swapped))


def test_a_table_that_reaches_outside_its_memory_is_refused(tmp_path: Path) -> None:
    manifest = recorded(tmp_path)
    memories = tuple((name, 16 if name == "arena" else size) for name, size in manifest.memories)
    with raises("relocation-invalid", match=r"^graphs/g0-4\.bin: nodes\[\d\].*memory arena, which has 16"):
        check_tables(ArchiveOf(tmp_path, replace(manifest, memories=memories)))


def test_a_table_of_an_image_that_the_bundle_has_not_is_refused(tmp_path: Path) -> None:
    manifest = recorded(tmp_path)
    without = tuple(file for file in manifest.files if not file.path.startswith("kernels/"))
    with raises("table-invalid", match="is not among the bundle's images"):
        check_tables(ArchiveOf(tmp_path, replace(manifest, files=without)))


def test_recordings_and_module_states_refer_to_nothing_of_the_hosts(tmp_path: Path) -> None:
    manifest = recorded(tmp_path)
    manifest = replace(manifest, memories=(*manifest.memories, ("host", 4096)))
    check_tables(ArchiveOf(tmp_path, manifest))
    host, image = MEMORIES.index("host"), next(file.sha256 for file in manifest.files if file.path.startswith("kernels/"))
    name = manifest.entries[0].programs[0].steps[0].file
    good = (tmp_path / name).read_bytes()
    recording = tables.decode(good)
    fill = next(node for node in recording.nodes if isinstance(node, MemsetNode))
    nodes = tuple([replace(fill, target=cuda_bundles.address(host, 0)) if node is fill else node for node in recording.nodes])
    (tmp_path / name).write_bytes(tables.encode(replace(recording, nodes=nodes)))
    with raises("table-invalid", match=r"^graphs/g0-4\.bin: nodes\[3\].*memory host, which the bundle does not have"):
        check_tables(ArchiveOf(tmp_path, manifest))
    (tmp_path / name).write_bytes(good)
    state = ModuleState(image=image, symbol="table", contents=bytes(8), relocations=cuda_bundles.relocations((0, host, 0)))
    (tmp_path / manifest.module_state).write_bytes(encode_states([state]))
    with raises("table-invalid", match=r"^graphs/modules\.bin: .*memory host, which the bundle does not have"):
        check_tables(ArchiveOf(tmp_path, manifest))


def test_module_states_that_reach_outside_their_memory_are_refused(tmp_path: Path) -> None:
    manifest = recorded(tmp_path)
    memories = tuple((name, 16 if name == "weights" else size) for name, size in manifest.memories)
    with raises("table-invalid", match=r"^graphs/modules\.bin: "):
        check_tables(ArchiveOf(tmp_path, edited(manifest, programs=(), memories=memories)))


def test_only_an_allowed_rule_or_near_ties_let_integers_differ() -> None:
    manifest = cpu()
    mask = replace(manifest.entries[0].outputs[0], dtype="bool")
    values = [
        tuple([replace(value, dtype="bool") if index else value for index, value in enumerate(p.values)])
        for p in manifest.entries[0].programs
    ]
    programs = tuple([replace(program, values=value) for program, value in zip(manifest.entries[0].programs, values, strict=True)])
    whole = edited(manifest, outputs=(mask,), programs=programs)
    equal = edited(whole, self_test=replace(manifest.entries[0].self_test, bounds=(0.0,)))
    reject(whole, "self_test.bounds[0]", "output y (bool) has to be equal, got 1e-05")
    check_manifest(equal)
    check_manifest(edited(whole, allowed=("mismatched-integers",)))
    check_manifest(
        edited(whole, allowed=("mismatched-integers",), self_test=replace(manifest.entries[0].self_test, bounds=(1.0,)))
    )  # a bound of 1: all elements may differ
    more = edited(whole, allowed=("mismatched-integers",), self_test=replace(manifest.entries[0].self_test, bounds=(1.5,)))
    reject(more, "self_test.bounds[0]", "output y (bool) has to be equal, got 1.5")
    note = Finding(rule="near-ties", severity="note", message="")
    check_manifest(tied := edited(whole, findings=(note,), self_test=replace(manifest.entries[0].self_test, bounds=(1.0,))))
    reject(
        edited(tied, self_test=replace(tied.entries[0].self_test, bounds=(1.5,))),
        "self_test.bounds[0]",
        "output y (bool) has to be equal, got 1.5",
    )
    bits = edited(tied, self_test=replace(tied.entries[0].self_test, compare="bits"))
    reject(bits, "self_test.bounds[0]", "output y (bool) has to be equal, got 1.0")


# --- both sides of limits ---------------------------------------------------------------------------------------------


def test_shapes_may_cost_as_much_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = cuda().entries[0]
    cost = 2 * len(entry.programs) * sum(operands(size) for spec in (*entry.inputs, *entry.outputs) for size in spec.shape)
    monkeypatch.setattr(limits, "SIZE_EVALUATIONS", cost)
    check_size_evaluations([entry, entry])
    monkeypatch.setattr(limits, "SIZE_EVALUATIONS", cost - 1)
    with raises("manifest-invalid", match="more than the limit"):
        check_size_evaluations([entry, entry])


def test_a_lowering_behind_one_that_was_left_out_is_looked_at() -> None:
    base = tried()(cuda())
    *others, last = base.entries[0].programs
    left_out = Lowering(name="left", chosen=False, microseconds=(), reason="no")
    check_manifest(edited(base, programs=(*others, replace(last, lowerings=(left_out, *last.lowerings)))))
    short = tuple([replace(row, microseconds=()) for row in last.lowerings])
    reject(edited(base, programs=(*others, replace(last, lowerings=(left_out, *short)))), "programs[1].lowerings[1].microseconds")


@pytest.mark.parametrize(("expected", "distance", "fits"), [
    ("recording", 0.5, True), ("recording", 1e-9, True), ("recording", 0.0, True), ("recording", -0.1, False),
    ("eager", 0.5, False), ("eager", 0.0, True),
])  # fmt: skip
def test_only_proofs_of_recordings_have_a_distance(expected: str, distance: float, fits: bool) -> None:
    manifest = cuda()
    proofs = tuple([replace(proof, distance=distance) for proof in manifest.entries[0].self_test.proofs])
    changed = edited(manifest, self_test=replace(manifest.entries[0].self_test, expected=expected, proofs=proofs))
    if fits:
        check_manifest(changed)
    else:
        reject(changed, "self_test.proofs[0].distance")


def test_forward_is_the_first_entry(tmp_path: Path) -> None:
    manifest = donation_bundles.write(tmp_path / "chained.cgb")
    first, second, *others = manifest.entries
    with raises("manifest-invalid", match=r"^entries\[1\]\.name: 'forward' is not the first entry"):
        check_manifest(replace(manifest, entries=(first, replace(second, name="forward"), *others)))


@pytest.mark.parametrize("level", ["load", "full"])
@pytest.mark.parametrize("golden", ["cpu_state", "traced_state"])
def test_what_is_checked_at_each_level(golden: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("check_weights", "check_tables", "check_host_code", "check_self_test"):
        module = bundle if name == "check_self_test" else contents
        monkeypatch.setattr(module, name, lambda opened, name=name: seen.append(name))
    monkeypatch.setattr(Archive, "check_hash", lambda self, file: seen.append(f"{file.path} hashed"))
    monkeypatch.setattr(Archive, "check_size", lambda self, file: seen.append(f"{file.path} measured"))
    opened = Archive(str(GOLDEN / f"v1/{golden}.cgb"))
    bundle.check_bundle(opened, level)
    assert ("check_self_test" in seen) == (level == "full") and ("check_tables" in seen) == (opened.manifest.target.kind == "cuda")
    assert {"check_weights", "check_host_code", f"{file_names.SELF_TEST} hashed"} <= set(seen)
    assert (f"{file_names.WEIGHTS} hashed" in seen) == (level == "full")
    assert (f"{file_names.WEIGHTS} measured" in seen) == (level == "load")


def test_no_two_entries_have_one_name(tmp_path: Path) -> None:
    manifest = donation_bundles.write(tmp_path / "chained.cgb")
    first, second, *others = manifest.entries
    with raises("manifest-invalid", match=rf"^entries\[1\]\.name: '{first.name}' occurs twice"):
        check_manifest(replace(manifest, entries=(first, replace(second, name=first.name), *others)))
