"""The rows of a bundle: what the compiler writes and the runtime reads.  No behaviour.

References are integers (positions in a tuple of the same manifest) or names; dtypes are the names in `DTYPES`.
`manifest_json.py` turns a `Manifest` into canonical JSON and back; `validate/` states every invariant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

KERNEL_CODE = "code"
"""Beside MEMORIES, in a manifest's `memories`: the bytes of all kernel images, which the driver loads into memory of its own."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """`pad` is "rows" (rows do not depend on each other: any filling is exact), "zeros" (only zeros were proved exact) or "no".
    `chunk` says that a call may be cut along this dimension; `reason` is shown when the runtime has to refuse.  `uncut`: why a call
    cannot be cut, where `reason` says more than that; else ""."""

    name: Name
    sizes: tuple[int, ...]
    pad: Name
    chunk: bool
    reason: str
    uncut: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """An input or output: `shape` may use dimension names.  `order` lists the axes from outermost to innermost in memory:
    (0, 1, 2, 3) is contiguous, (0, 2, 3, 1) is channels last.

    `range` is (low, high) of an integer input whose elements the model uses as indices: low <= element < high.  () for others.
    """

    name: Name
    dtype: Name
    shape: Sizes
    order: Shape
    range: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`arch` is the machine ("x86_64") or "sm_90"; `driver` the lowest version of the CUDA driver, as it reports it (13000 = 13.0).

    `features` are the processor flags that host code uses, `torch` the lowest version whose shared libraries it needs: both are
    empty without host regions, and `torch` where the code for a CPU brings all that it needs.  `level` is what a bundle for a CPU
    was asked to be for, such as "x86-64-v3", or "" for processors like the one that built it.
    """

    kind: Name
    arch: Name
    level: Name
    features: tuple[Name, ...]
    torch: Name
    driver: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter, buffer or constant.  `tensor` names it in weights.safetensors, or where it is a table of the build's in
    tables.safetensors; tied weights name the same tensor.

    `memory` is "weights", or "state" for a buffer that calls change: the file holds what every session starts with, unless that is
    `zeros`.  `offset` is its place there, 256-byte aligned.  In memory weights it is 0 on the cpu target and may be
    `spans.HOST_ONLY` on the cuda target.
    """

    name: Name
    tensor: Name
    dtype: Name
    shape: Shape
    strides: Shape
    memory: Name
    offset: int
    zeros: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedWeight:
    """A weight, by its position, that an update of the loaded program must leave as it is.  `reason` is "constant" (it is not in
    the model's state_dict), "folded" (compiled code holds values that were computed from it), "baked" (Python read its value while
    the bundle was built, for a branch, a size or a number of the program) or "state" (calls change it).

    `sha256` is that of its bytes in the file.  `where` is the user's file:line that read a baked one, "" of all others."""

    weight: int
    reason: Name
    sha256: Name
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A tensor of one program: where it lies (bytes into `memory`; 0 on the cpu target) and how (strides in elements)."""

    dtype: Name
    shape: Shape
    strides: Shape
    memory: Name
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A piece of the exported graph: `kind` graph or host.  `file` is a host region's shared object, "" for a graph
    region; `constants` pairs the shared object's own name of a constant with the position of a weight."""

    name: Name
    kind: Name
    reason: str
    file: Name
    constants: tuple[tuple[Name, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a program.  graph: `file` is the recording's table.  host: the region runs on `inputs` and writes `outputs`.
    copy: `inputs[0]` is copied to `outputs[0]`.  Inputs and outputs are positions in the program's values."""

    kind: Name
    region: int
    file: Name
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """A way in which the graph regions of one int_key were lowered, when a build tried several: "eager", "inductor",
    "max-autotune" or "traced".

    `microseconds` are what its graphs took on the GPU that built the bundle, one for each graph step, in order: the median of
    repeated launches.  () where it was left out; `reason` then says why, and is "" for all others.  `chosen`: the program is this
    one.
    """

    name: Name
    chosen: bool
    microseconds: tuple[float, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What replay does for one int_key.  `inputs` and `outputs` are the values of the call, in the signature's order;
    `arena` and `static` are the bytes that this key needs of memory `arena` and `inputs`.  `lowerings` are those that the build
    tried, () where it was told which one to take."""

    key: IntKey
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]
    arena: int
    static: int
    lowerings: tuple[Lowering, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Output number `output` lies in number `index` of what `memory` names.  That is `inputs` (the caller's own tensor), `outputs`
    (one that is no alias itself), or "weights" or "state", the manifest's weights.  Its Values say where: on the cuda
    target at the place of the other one; on the cpu target `offset` is in bytes from the other one's first element."""

    output: int
    memory: Name
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """Axis number `axis` of output number `output` is filled up with zeros: its first elements count, as many as output number
    `count` says, int64 of no axes.  A call gives these alone, and not the counts, which stand behind the model's outputs."""

    output: int
    axis: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found: `severity` is refuse, host or note.  `node` names a node of the exported program, or is "" where the
    finding concerns the whole model; `where` is the user's file:line or ""."""

    rule: Name
    severity: Name
    message: str
    node: Name
    where: str
    source: str
    effect: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of `Manifest.call`: whether it is given by name only, and its default, which is one tree of constants, or none.
    None is said of a default that is no constant."""

    keyword: bool
    default: tuple[Tree, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """How one int_key was verified when the bundle was built.  `method` is one of replay, interpret, none.

    `errors` are those against eager PyTorch of the tensors that the exam compares, in the order of `exam_tensors`; () where none
    were measured.  `error` and `tolerance` are the one that came nearest to its bound, and this bound.  `distance` is that of the
    replay from the recording, where the exam holds one.  All errors are as `comparison.difference` has them.
    """

    key: IntKey
    method: Name
    error: float
    tolerance: float
    errors: tuple[float, ...]
    distance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """How `verify --run` compares: `bits` (equal bytes) or `tolerance` (within `bounds`, one per tensor: see `exam_tensors`).

    Every int_key begins from the first state and is called `calls` times with its inputs.  What the last call gives is compared,
    and what it leaves behind.  `expected` is what the exam holds: what `eager` PyTorch gave, or what the `recording` did.
    """

    compare: Name
    calls: int
    expected: str
    bounds: tuple[float, ...]
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the bundle comes from: `source` is the model as the user named it, `created` in UTC (ISO 8601), `versions` those
    of what built it, `machine` its processor or GPU."""

    source: str
    created: Name
    versions: tuple[tuple[str, str], ...]
    machine: str
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of the bundle, by path relative to it, with forward slashes."""

    path: Name
    bytes: int
    sha256: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A callable of the bundle: the method `name` of the module.  Its fields are those of the manifest that have the same names;
    the manifest's own are of the first entry."""

    name: Name
    dimensions: tuple[Dimension, ...]
    inputs: tuple[TensorSpec, ...]
    written: tuple[int, ...]
    changes: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: tuple[Alias, ...]
    call: Tree
    parameters: tuple[Parameter, ...]
    result: Tree
    programs: tuple[Program, ...]
    findings: tuple[Finding, ...]
    exam: Exam
    data_sizes: tuple[DataSize, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Input number `input` of entry `target` is taken where it lies, without a copy, where a call is given output number `output`
    of entry `source`, and both are laid out alike."""

    source: Name
    output: int
    target: Name
    input: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Bytes of memory arena from `offset` on that programs of one entry alone use: its outputs that are in `chains` lie there, and
    stay until it is called again."""

    entry: Name
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The bundle is that of rank number `rank` of `size`: one device's share of a model over several.

    Memory `peer` is a range of addresses with a part of `stride` bytes for each rank, in their order.  Rank r's part lies on its
    device, begins as zeros, and all ranks can write to it.  Of its part a rank reads, as little-endian numbers: the 4 bytes at
    `status`, 0 or 1 + the rank that a kernel has waited for in vain; the 8 bytes at `limit` are the nanoseconds that kernels wait.
    """

    rank: int
    size: int
    stride: int
    status: int
    limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a bundle but its bulk.

    `entry` is the name of its first entry, the method that `dimensions` to `result`, `programs`, `findings` and `exam` are of;
    `entries` are the further ones.  `entries.py` gives a manifest for each.  `chains`, of outputs that a later call takes, are of
    all entries, and so is `reserved`, where they lie on a GPU.

    `written`: positions in `inputs` of those that a call changes in place, in the caller's own memory.  `changes`: positions in
    `weights` of the state that a call changes.  `aliases`: outputs that share memory, by output.  `random`: the position in
    `weights` of the state of the random numbers, int64 [seed, calls so far], or -1 for a model that draws none.  `parameters`:
    those of `call`, in its order.  `fixed`: the weights that no update may change, by position.  `tables`: positions in `weights`
    of what the build computed, whose tensors lie in tables.safetensors.  `world`: of a bundle over several devices which rank it
    is, () of all others.  `data_sizes`: axes of outputs whose sizes depend on data."""

    format: int
    name: Name
    target: Target
    entry: Name
    dimensions: tuple[Dimension, ...]
    inputs: tuple[TensorSpec, ...]
    written: tuple[int, ...]
    changes: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: tuple[Alias, ...]
    random: int
    call: Tree
    parameters: tuple[Parameter, ...]
    result: Tree
    weights: tuple[Weight, ...]
    fixed: tuple[FixedWeight, ...]
    tables: tuple[int, ...]
    world: tuple[World, ...] = ()
    memories: tuple[tuple[Name, int], ...]
    regions: tuple[Region, ...]
    programs: tuple[Program, ...]
    module_state: Name
    findings: tuple[Finding, ...]
    waivers: tuple[Name, ...]
    exam: Exam
    entries: tuple[Entry, ...]
    chains: tuple[Chain, ...]
    reserved: tuple[Reserved, ...]
    provenance: Provenance
    files: tuple[File, ...]
    data_sizes: tuple[DataSize, ...] = ()
