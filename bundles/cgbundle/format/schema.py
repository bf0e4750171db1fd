"""The records of a manifest, which the compiler writes and the runtime reads. References are positions in a tuple of the same
manifest, or names. `manifest_json.py` decodes them by their annotations: `Name`, `Bytes`, `Literal` and the like are constraints. A
field that has its default is left out of the text. `validate/` has the invariants between fields."""

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
"""The memories of values and addresses. `host` on the cpu target: allocated by a host region during the call; beside a GPU: one
pinned buffer for values that host steps read or write. `peer`: where ranks exchange data (see `World`); no value is in it."""

STATE, HOST = "state", "host"
"""State lasts from call to call. Weights of memory host are read by host regions only, in the mapped file."""

PERSISTENT = ("weights", STATE)  # steps may read these without an earlier step that writes them
KERNEL_CODE = "code"
"""A further name in a manifest's `memories`: the bytes of all kernel images, which the driver loads into memory of its own."""

Dtype = str  # a name of DTYPES
Memory = str  # a name of MEMORIES
Name = str  # printable text of at most `limits.NAME` characters; other `str` is text for people
Shape = tuple[int, ...]  # a number for each axis, at most `limits.AXES`: sizes, strides, an order
Size = int | str | tuple[Any, ...]  # an int, the name of a dimension, or (operator + - * // %, left, right)
Sizes = tuple[Size, ...]  # a shape that may use dimension names
Tree = dict[str, Any]  # nested structure of a call's inputs or outputs as JSON: see `pytree.py`
IntKey = tuple[int, ...]  # the sizes of all declared dimensions, in declared order
Position = int  # index into a tuple of the manifest: 0 or more
Bytes = int  # a size or an offset: 0 or more
Error = float  # 0 or more
Sha256 = str  # 64 lower-case hexadecimal digits
VERSION = 1  # of the format; earlier bundles have a field `format` instead of `version`, and are refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """`sizes` ascend. `pad`: "rows" (rows are independent, so any padding works), "zeros" (only zeros were verified) or "no".
    `chunk`: a call may be split along this dimension. `reason` explains a refusal; `not_chunked` explains why a call cannot be
    split, if `reason` says more than that."""

    name: Name
    sizes: tuple[int, ...]
    pad: Literal["rows", "zeros", "no"]
    chunk: bool
    reason: str
    not_chunked: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """An input or output; `shape` may use dimension names. `order`: the axes from outermost to innermost in memory, (0, 2, 3, 1)
    for channels last. `range`: (low, high) for an integer input that the model uses as indices, low <= element < high."""

    name: Name
    dtype: Dtype
    shape: Sizes
    order: Shape
    range: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`arch` is "x86_64" or "sm_90"; `driver` the lowest version of the CUDA driver (13000 = 13.0). `features`: processor flags
    that host code uses. `torch`: the lowest version whose shared libraries host code needs. `level`: the requested CPU level, such
    as "x86-64-v3"; absent for processors like the one that built it."""

    kind: Literal["cpu", "cuda"]
    arch: Name
    level: Name = ""
    features: tuple[Name, ...] = ()
    torch: Name = ""
    driver: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter, buffer or constant. `tensor` names it in weights.safetensors, or in tables.safetensors if `computed` by the
    build; tied weights name the same tensor. `strides` (elements) are those of the model's tensor; the file has its elements in
    memory order. Calls change memory `state`; its initial values are in the file, or it is `zeros` and in no file. Only host
    regions beside a GPU read memory `host`. `offset` in its memory is 256-byte aligned; 0 in memory host and in memory weights of
    the cpu target."""

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
    """A weight that updates must leave as it is. `reason`: "constant" (not in the state_dict), "folded" (code holds values computed
    from it), "baked" (Python read its value during the build) or "state". `sha256` is of its bytes in the file; `where`: the user's
    file:line that read the value ("baked")."""

    weight: Position
    reason: Literal["constant", "folded", "baked", "state"]
    sha256: Sha256
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A tensor of one program: `offset` in bytes into `memory` (0 on the cpu target), strides in elements."""

    dtype: Dtype
    shape: Shape
    strides: Shape
    memory: Memory
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A part of the exported program. `file`: a host region's shared object. `constants`: (name in the shared object, position of
    the weight)."""

    name: Name
    kind: Literal["graph", "host"]
    reason: str = ""
    file: Name = ""
    constants: tuple[tuple[Name, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step of a program. graph: `file` is the recording. host: the region reads `inputs` and writes `outputs`. copy: copies
    `inputs[0]` to `outputs[0]`. Inputs and outputs are positions in the program's values."""

    kind: Literal["graph", "host", "copy"]
    region: int
    file: Name = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """A lowering that the build tried for one int_key: "eager", "inductor", "max-autotune" or "cross-compile". `microseconds`:
    median GPU time of each graph step. `reason`: why it was left out; then it has no times. `chosen`: the program uses this one."""

    name: Name
    chosen: bool = False
    microseconds: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What replay does for one int_key. `inputs` and `outputs` are the call's values, in the signature's order. `arena` and
    `static` are the bytes that it needs of memory `arena` and `inputs`. `lowerings`: those that the build tried, if it chose."""

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
    """Output `output` shares memory with tensor number `index` of `memory`: the call's `inputs` or `outputs` (one that is no
    alias), or the manifest's weights ("weights", "state"). The program's Values have the offsets; on the cpu target they are bytes
    from the first element of the other tensor."""

    output: Position
    memory: Literal["inputs", "outputs", "weights", "state"]
    index: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """Axis `axis` of output `output` is padded with zeros; the scalar int64 output `count` has its true size. Calls return the
    valid elements, and not the counts, which follow the model's outputs."""

    output: Position
    axis: Position
    count: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A finding of a check. `node`: a node of the exported program, "" for the whole model. `where`: the user's file:line."""

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
    """A parameter of `EntrySpec.call`: whether it is keyword-only, and its default as a tree of constants (None: it has none, or
    none that is constant)."""

    keyword: bool = False
    default: Tree | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """How one int_key was verified at build time. `errors` against eager PyTorch, in the order of `self_test_tensors`; absent if
    not measured. `error` and `tolerance`: the largest one in proportion to its bound, and this bound. `distance`: the error against
    the recording, if the self-test has it. `comparison.difference` defines errors."""

    key: IntKey
    method: Literal["replay", "interpret", "none"]
    error: Error = 0.0
    tolerance: Error = 0.0
    errors: tuple[Error, ...] = ()
    distance: Error = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """How `verify --run` compares: `bits`, or `tolerance` within `bounds`, one per compared tensor. Each int_key starts from the
    initial state and is called `calls` times with its inputs; the last results are compared. `expected`: results of `eager` PyTorch
    or of the `recording`."""

    compare: Literal["bits", "tolerance"]
    calls: int
    expected: Literal["eager", "recording"]
    bounds: tuple[Error, ...]
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """`source`: the model as the user named it; `created` in UTC (ISO 8601); `versions` of the software that built it; `machine`:
    processor or GPU."""

    source: str
    created: Name
    versions: tuple[tuple[str, str], ...]
    machine: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of the bundle, by its relative path with forward slashes."""

    path: Name
    bytes: Bytes
    sha256: Sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class EntrySpec:
    """A callable of the bundle: the method `name` of the module. `mutated_inputs`: positions of inputs that a call changes in the
    caller's memory. `mutated_buffers`: positions of the state weights that a call changes. `aliases`: outputs that share memory.
    `parameters`: those of `call`, in order. `data_sizes`: axes of outputs whose sizes depend on data."""

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
    """Entry `target` reads input `input` in place if it is output `output` of entry `source` and has the same layout."""

    source: Name
    output: Position
    target: Name
    input: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class DonatedRange:
    """A range of memory arena for the donated outputs of one entry, which stay until that entry is called again."""

    entry: Name
    offset: Bytes
    bytes: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The bundle is rank `rank` of `size`: one device's share of a model. Memory `peer` has a part of `stride` bytes per rank, in
    order; rank r's part is on its device, starts as zeros, and all ranks can write to it. A rank's part has, little-endian: at
    `status` 4 bytes, 0 or 1 + the rank for which a kernel waited too long; at `limit` 8 bytes, the time limit of kernels in ns."""

    rank: int
    size: int
    stride: Bytes
    status: Bytes
    limit: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDimension:
    """A number that `load` chooses: the rows (first axis) of the state `weights`, which have the minimum in the manifest. Compiled
    code reads it in state `count`, int64 [1], if needed. `most`: more rows are useless."""

    name: Name
    weights: tuple[Position, ...]
    count: Position | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpan:
    """A range of memory inputs that `attach` replaces by memory of the engine, at any multiple of `alignment`. Overlapping tensors
    share a span."""

    offset: Bytes
    bytes: Bytes
    alignment: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTensor:
    """A tensor that an engine's graphs use. Memory inputs: the caller passes it to `attach`, in a span. Memory arena: `attach`
    returns it. `strides` in elements, `offset` in bytes."""

    name: str
    dtype: Dtype
    shape: Shape
    strides: Shape
    memory: Literal["inputs", "arena"]
    offset: Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGraph:
    """A captured graph of an engine. `key` is the engine's key as JSON: a number, a text, or a list of these for a tuple. `file` is
    its recording, whose int_key is the graph's position."""

    key: str
    file: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Graphs that another program captured, to be replayed over the tensors of a later process. Memory inputs is not allocated: its
    `spans` ascend, at least a byte apart. All graphs share one arena, as they did when captured. `verified`: a fresh process
    replayed every graph and got the same bits."""

    graphs: tuple[EngineGraph, ...]
    tensors: tuple[EngineTensor, ...]
    spans: tuple[EngineSpan, ...]
    verified: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All data of a bundle except weights, images and tables. `entries`: at least one; `forward`, if present, is the first.
    `random`: position of the state of the random numbers, int64 [seed, number of calls]. `frozen`: weights that no update may
    change. `memories`: bytes by name. `state_dimensions`: rows of state that `load` chooses. `donations`: outputs that a later call
    reads in place; `donated`: their ranges on a GPU. `allowed`: rules whose findings the user allowed. `world`: the rank, for a
    model over several devices. `engine`: captured graphs instead of entries."""

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
