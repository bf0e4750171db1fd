"""The records of a manifest: what the compiler writes and the runtime reads.  No behaviour.

References are integers (positions in a tuple of the same manifest) or names; dtypes are the names in `DTYPES`.
`manifest_json.py` turns a `Manifest` into canonical JSON and back, driven by the annotations: `Name`, `Bytes`, `Literal` and the
like are constraints that reading checks.  A field with a default is left out of the text where it has that value: this is the
only way to say that something is absent.  `validate/` states the invariants between fields.
"""

from __future__ import annotations

from typing import Any, Literal

from .records import dataclass

DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element of every dtype that a bundle may hold."""

MEMORIES = ("weights", "state", "inputs", "arena", "host", "peer")
"""Where a value or an address may lie.  On the cpu target `host` is memory that a
host region allocates during the call; beside a GPU it is one pinned buffer, through which values cross.  `peer` is what the ranks
of a model exchange data through: see `World`.  Addresses alone lie there, no values."""

STATE, HOST = "state", "host"
"""The memory that holds what lasts from call to call; and that of weights which host regions beside a GPU alone read, in the mapped
file: they are not put on the GPU."""

PERSISTENT = ("weights", STATE)
"""Memories that hold their contents from call to call: a step may read there what no step of its program wrote."""

KERNEL_CODE = "code"
"""Beside MEMORIES, in a manifest's `memories`: the bytes of all kernel images, which the driver loads into memory of its own."""

Dtype = str
"""A name of DTYPES."""

Memory = str
"""A name of MEMORIES."""

Name = str
"""Printable text of `limits.NAME` characters at the most; another `str` is text for people, of `limits.TEXT`."""

Shape = tuple[int, ...]
"""A number for every axis, for `limits.AXES` at the most: sizes, strides, an order."""

Size = int | str | tuple[Any, ...]
"""A size in a shape: an int, the name of a dimension, or (operator, left, right) with operator + - * // %."""

Sizes = tuple[Size, ...]
"""A shape that may use dimension names."""

Tree = dict[str, Any]
"""Nested structure of a call's inputs or outputs as JSON: see `pytree.py`."""

IntKey = tuple[int, ...]
"""The sizes of all declared dimensions, in declared order."""

Position = int
"""Of a record in a tuple of the manifest: 0 or more."""

Bytes = int
"""A size or an offset: 0 or more."""

Error = float
"""0 or more."""

Sha256 = str
"""64 lower-case hexadecimal digits."""

VERSION = 1
"""The format's version.  What was written before it has a field `format` instead of `version`, and is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """`sizes` ascend.  `pad` is "rows" (rows do not depend on each other: any filling is exact), "zeros" (only zeros were proved
    exact) or "no".  `chunk`: a call may be split along this dimension.  `reason` is shown when the runtime has to refuse;
    `not_chunked` says why a call cannot be split, where `reason` says more than that."""

    name: Name
    sizes: tuple[int, ...]
    pad: Literal["rows", "zeros", "no"]
    chunk: bool
    reason: str
    not_chunked: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """An input or output: `shape` may use dimension names.  `order` lists the axes from outermost to innermost in memory:
    (0, 1, 2, 3) is contiguous, (0, 2, 3, 1) is channels last.

    `range` is (low, high) of an integer input whose elements the model uses as indices: low <= element < high.
    """

    name: Name
    dtype: Dtype
    shape: Sizes
    order: Shape
    range: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`arch` is the machine ("x86_64") or "sm_90"; `driver` the lowest version of the CUDA driver, as it reports it (13000 = 13.0).

    `features` are the processor flags that host code uses, `torch` the lowest version whose shared libraries it needs: both are
    absent without host regions, and `torch` where the code for a CPU brings all that it needs.  `level` is what a bundle for a CPU
    was asked to be for, such as "x86-64-v3"; absent, for processors like the one that built it.
    """

    kind: Literal["cpu", "cuda"]
    arch: Name
    level: Name = ""
    features: tuple[Name, ...] = ()
    torch: Name = ""
    driver: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter, buffer or constant.  `tensor` names it in weights.safetensors, or where `computed` by the build in
    tables.safetensors; tied weights name the same tensor.

    `strides` are those of the model's own tensor, in elements; the file holds it in the order of its memory.  `memory` is `state`
    for what calls change, and the file holds its initial value; state that begins as zeros stands in no file, and has `zeros`.
    `host` is for what only host regions beside a GPU read, in the mapped file.  `offset` is the weight's place in its memory,
    256-byte aligned; 0 in memory host, and in memory weights of the cpu target.
    """

    name: Name
    tensor: Name
    dtype: Dtype
    shape: Shape
    strides: Shape
    memory: Literal["weights", "state", "host"] = "weights"
    offset: Bytes = 0
    zeros: bool = False
    computed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeight:
    """A weight, by its position, that an update of the loaded program must leave as it is.  `reason` is "constant" (it is not in
    the model's state_dict), "folded" (compiled code holds values that were computed from it), "baked" (Python read its value while
    the bundle was built, for a branch, a size or a number of the program) or "state" (calls change it).

    `sha256` is that of its bytes in the file.  `where` is the user's file:line that read a baked one."""

    weight: Position
    reason: Literal["constant", "folded", "baked", "state"]
    sha256: Sha256
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A tensor of one program: where it lies (bytes into `memory`; 0 on the cpu target) and how (strides in elements)."""

    dtype: Dtype
    shape: Shape
    strides: Shape
    memory: Memory
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A piece of the exported graph.  `file` is a host region's shared object; `constants` pairs the shared object's own name of a
    constant with the position of a weight."""

    name: Name
    kind: Literal["graph", "host"]
    reason: str = ""
    file: Name = ""
    constants: tuple[tuple[Name, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a program.  graph: `file` is the recording's table.  host: the region runs on `inputs` and writes `outputs`.
    copy: `inputs[0]` is copied to `outputs[0]`.  Inputs and outputs are positions in the program's values."""

    kind: Literal["graph", "host", "copy"]
    region: int
    file: Name = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """A way in which the graph regions of one int_key were lowered, when a build tried several: "eager", "inductor",
    "max-autotune" or "cross-compile".

    `microseconds` are what its graphs took on the GPU that built the bundle, one for each graph step, in order: the median of
    repeated launches.  It is absent where the lowering was left out; `reason` then says why, and is absent for all others.
    `chosen`: the program is this one.
    """

    name: Name
    chosen: bool = False
    microseconds: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What replay does for one int_key.  `inputs` and `outputs` are the values of the call, in the signature's order;
    `arena` and `static` are the bytes that this key needs of memory `arena` and `inputs`.  `lowerings` are those that the build
    tried, absent where it was told which one to take."""

    key: IntKey
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]
    arena: Bytes
    static: Bytes
    lowerings: tuple[Lowering, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Output number `output` lies in number `index` of what `memory` names.  That is `inputs` (the caller's own tensor), `outputs`
    (one that is no alias itself), or "weights" or "state", the manifest's weights.  Its Values say where: on the cuda
    target at the place of the other one; on the cpu target `offset` is in bytes from the other one's first element."""

    output: Position
    memory: Literal["inputs", "outputs", "weights", "state"]
    index: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """Axis number `axis` of output number `output` is filled up with zeros: its first elements count, as many as output number
    `count` says, int64 of no axes.  A call gives these alone, and not the counts, which stand behind the model's outputs."""

    output: Position
    axis: Position
    count: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A finding of a check.  `node` names a node of the exported program, "" for the whole model.  `where` is the user's
    file:line."""

    rule: Name
    severity: Literal["refuse", "host", "note"]
    message: str
    node: Name = ""
    where: str = ""
    source: str = ""
    effect: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of `EntrySpec.call`: whether it is given by name only, and its default, a tree of constants.  A parameter without
    one, and one whose default is no constant, has None."""

    keyword: bool = False
    default: Tree | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """How one int_key was verified when the bundle was built.

    `errors` are those against eager PyTorch of the tensors that the self-test compares, in the order of `compared_tensors`; absent
    where none were measured.  `error` and `tolerance` are the one that came nearest to its bound, and this bound.  `distance` is
    that of the replay from the recording, where the self-test holds one.  All errors are as `comparison.difference` has them.
    """

    key: IntKey
    method: Literal["replay", "interpret", "none"]
    error: Error = 0.0
    tolerance: Error = 0.0
    errors: tuple[Error, ...] = ()
    distance: Error = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """How `verify --run` compares: `bits` (equal bytes) or `tolerance` (within `bounds`, one per tensor: see `compared_tensors`).

    Every int_key begins from the initial state and is called `calls` times with its inputs.  What the last call gives is compared,
    and what it leaves behind.  `expected` is what the self-test holds: what `eager` PyTorch gave, or what the `recording` did.
    """

    compare: Literal["bits", "tolerance"]
    calls: int
    expected: Literal["eager", "recording"]
    bounds: tuple[Error, ...]
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the bundle comes from: `source` is the model as the user named it, `created` in UTC (ISO 8601), `versions` those
    of what built it, `machine` its processor or GPU."""

    source: str
    created: Name
    versions: tuple[tuple[str, str], ...]
    machine: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of the bundle, by path relative to it, with forward slashes."""

    path: Name
    bytes: Bytes
    sha256: Sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class EntrySpec:
    """A callable of the bundle: the method `name` of the module.

    `mutated_inputs`: positions in `inputs` of those that a call changes in place, in the caller's own memory.  `mutated_buffers`:
    positions in the manifest's `weights` of the state that a call changes.  `aliases`: outputs that share memory, by output.
    `parameters`: those of `call`, in its order.  `data_sizes`: axes of outputs whose sizes depend on data."""

    name: Name
    dimensions: tuple[Dimension, ...] = ()
    inputs: tuple[TensorSpec, ...]
    mutated_inputs: tuple[int, ...] = ()
    mutated_buffers: tuple[int, ...] = ()
    outputs: tuple[TensorSpec, ...]
    aliases: tuple[Alias, ...] = ()
    data_sizes: tuple[DataSize, ...] = ()
    call: Tree
    parameters: tuple[Parameter, ...]
    result: Tree
    programs: tuple[Program, ...]
    findings: tuple[Finding, ...] = ()
    self_test: SelfTest


@dataclass(frozen=True, kw_only=True, slots=True)
class Donation:
    """Input number `input` of entry `target` is taken where it lies, without a copy, where a call is given output number `output`
    of entry `source`, and both are laid out alike."""

    source: Name
    output: Position
    target: Name
    input: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class DonatedRange:
    """Bytes of memory arena from `offset` on that programs of one entry alone use: its outputs that are donated lie there, and
    stay until it is called again."""

    entry: Name
    offset: Bytes
    bytes: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The bundle is that of rank number `rank` of `size`: one device's share of a model over several.

    Memory `peer` is a range of addresses with a part of `stride` bytes for each rank, in their order.  Rank r's part lies on its
    device, begins as zeros, and all ranks can write to it.  Of its part a rank reads, as little-endian numbers: the 4 bytes at
    `status`, 0 or 1 + the rank that a kernel has waited for in vain; the 8 bytes at `limit` are the nanoseconds that kernels wait.
    """

    rank: int
    size: int
    stride: Bytes
    status: Bytes
    limit: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDimension:
    """A number that `load` chooses: how many rows the state `weights`, by position, has on its first axis.  They have the fewest in
    the manifest.  Compiled code reads the number in state `count`, int64 [1], absent where none has to.  `most`: with more rows
    nothing is gained."""

    name: Name
    weights: tuple[Position, ...]
    count: Position | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpan:
    """Bytes of memory inputs that stand for memory of the engine's: `attach` is given tensors that lie there, at any address that
    is a multiple of `alignment`.  Tensors that overlap share a span."""

    offset: Bytes
    bytes: Bytes
    alignment: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTensor:
    """A tensor that an engine's graphs read or write.  In memory inputs it lies in a span, and `attach` is given it; in memory
    arena it lies among the graphs' temporaries, and `attach` gives it.  `strides` in elements, `offset` in bytes."""

    name: str
    dtype: Dtype
    shape: Shape
    strides: Shape
    memory: Literal["inputs", "arena"]
    offset: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGraph:
    """A graph that an engine captured.  `key` is the engine's own, as JSON: a number, a text, or a list of these for a tuple.
    `file` is its recording, whose own key is the graph's position."""

    key: str
    file: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Graphs that another program captured, to be replayed over the tensors of a later process of it.

    Memory inputs is not allocated: its `spans` ascend, and a byte or more lies between two of them.  All graphs share one arena,
    and none of its bytes are used by two of them unless they shared them when they were captured.  `verified`: a fresh process
    replayed every graph, and the tensors then held the same bits."""

    graphs: tuple[EngineGraph, ...]
    tensors: tuple[EngineTensor, ...]
    spans: tuple[EngineSpan, ...]
    verified: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All data of a bundle except weights, images and tables.

    `entries`: at least one; `forward`, if there is one, is the first.  `random`: the position in `weights` of the state of the
    random numbers, int64 [seed, number of calls].  `frozen`: weights that no update may change, by position.  `memories`: the bytes
    of each memory, by name.  `state_dimensions`: the dimensions of state whose number of rows `load` chooses.  `donations`: outputs
    that a later call reads in place; `donated`: their ranges on a GPU.  `allowed`: rules whose findings the user allowed.  `world`:
    the rank of this bundle, for a model over several devices.  `engine`: graphs that another program captured, instead of
    entries."""

    version: int
    name: Name
    target: Target
    entries: tuple[EntrySpec, ...]
    weights: tuple[Weight, ...] = ()
    random: Position | None = None
    frozen: tuple[FrozenWeight, ...] = ()
    memories: tuple[tuple[Name, Bytes], ...]
    state_dimensions: tuple[StateDimension, ...] = ()
    regions: tuple[Region, ...]
    module_state: Name = ""
    donations: tuple[Donation, ...] = ()
    donated: tuple[DonatedRange, ...] = ()
    allowed: tuple[Name, ...] = ()
    world: World | None = None
    engine: Engine | None = None
    provenance: Provenance
    files: tuple[File, ...]
