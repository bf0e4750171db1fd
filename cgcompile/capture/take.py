"""Data that a recorder process sends to its parent: the captured graphs as this process sees them.  Blocks keep the raw addresses.
Each address also has readings, which are (range, offset) pairs into the process's `Range` table.  One address can have two: inside
a range, and one past the end of the range before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cgbundle.format.schema import IntKey

from ..util.tolerance import Difference

WEIGHTS, INPUTS = 0, 1
"""Indices of the first two ranges of a recorder process: its weights buffer and its static inputs.  The state buffer is next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A place that an address can mean: `offset` bytes into range number `range` (offset = size: one past the end)."""

    range: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """The 8 bytes at offset `at` of a block, which are a live address.  `readings`: its possible places, the most likely first."""

    at: int
    readings: tuple[Reading, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A range of device memory that addresses may point into.

    `kind`: "weights", "inputs" and "state" are buffers of the recorder, which begin at `offset` of that memory.  For an engine,
    "inputs" holds its named tensors.  "pool": a segment of the private pool of `key` (None: of all graphs).  "torch": a live block
    of torch's default pool.  "device": an allocation that torch did not make.  "host": pinned host memory.  `contents`: bytes of a
    referenced "torch" or "device" range before any graph ran; `words`: the live addresses in them.
    """

    kind: str
    start: int
    size: int
    key: IntKey | None = None
    contents: bytes = b""
    words: tuple[Word, ...] = ()
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointee:
    """The allocation that a live address points into.  `kind`: "device" or "host".  Start and size in bytes are 0 for "host"."""

    kind: str
    start: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Bytes that may hold addresses: a kernel's parameters, or a module variable."""

    data: bytes
    words: tuple[Word, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawKernel:
    """A kernel node.  `image`: SHA-256 of its cubin.  Attributes: (number, value or values), as in recordings.Function and
    KernelNode.  `line`: file:line of the Python code that launched it, or "" if unknown."""

    image: str
    symbol: str
    params: tuple[tuple[int, int], ...]
    function_attributes: tuple[tuple[int, int], ...]
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    attributes: tuple[tuple[int, tuple[int, int, int]], ...]
    block: Block
    line: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawMemset:
    """A memset node.  `shape`: (value, element, width, height, pitch) as in recordings.MemsetNode."""

    target: Word
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawMemcpy:
    """A device-to-device copy node.  `shape`: (width, height, depth, source pitch and height, target pitch and height)."""

    source: Word
    target: Word
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawEmpty:
    """An empty node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSetCondition:
    """Sets the condition of branch or loop number `conditional` to the byte at an address."""

    conditional: int
    byte: Word


@dataclass(frozen=True, kw_only=True, slots=True)
class RawBegin:
    """Begins the first body of a branch or loop.  `type`: as in ConditionalNode."""

    conditional: int
    type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RawNextBody:
    """Begins the next body of the same branch or loop."""

    conditional: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RawEnd:
    """Ends the last body of a branch or loop."""

    conditional: int


RawNode = RawKernel | RawMemset | RawMemcpy | RawEmpty
"""A node of a captured CUDA graph."""

RawRow = RawNode | RawSetCondition | RawBegin | RawNextBody | RawEnd
"""A node, or a mark of a branch or loop.  The nodes between two marks are one captured graph."""

RawEdge = tuple[int, int, int, int, int]
"""(source, target, from_port, to_port, type); source and target are row positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawValue:
    """A tensor of the call: dtype name as in schema.DTYPES, shape and strides in elements, and its address."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: Word


@dataclass(frozen=True, kw_only=True, slots=True)
class RawGraph:
    """Captured region number `region` of its key.  `edges` connect nodes of the same captured graph.  `inputs` and `outputs`: the
    region's tensors.  `name`: the name in messages, if it has no int_key."""

    key: IntKey
    nodes: tuple[RawRow, ...]
    edges: tuple[RawEdge, ...]
    inputs: tuple[RawValue, ...]
    outputs: tuple[RawValue, ...]
    region: int = 0
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawModuleState:
    """A module variable of an image that differs from its initial bytes, or that kernels can write."""

    image: str
    symbol: str
    block: Block


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSelfTest:
    """A replay on the self-test's inputs.  `outputs`, `mutated` and `state`: as in ReplayedBytes.  `differences`: those from eager
    PyTorch, for outputs, mutated inputs, and state, in this order.  `indices`: as in `near_ties.judge.Verdict`.  `steady`: further
    replays gave the same bits."""

    key: IntKey
    outputs: tuple[bytes, ...]
    differences: tuple[Difference, ...]
    mutated: tuple[bytes, ...] = ()
    state: tuple[tuple[str, bytes, bytes], ...] = ()
    indices: tuple[tuple[int, int], ...] = ()
    steady: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """Everything that one recorder process captured.  `mutated`: names of weights outside state that a replay changes."""

    ranges: tuple[Range, ...]
    graphs: tuple[RawGraph, ...]
    states: tuple[RawModuleState, ...]
    self_tests: tuple[RawSelfTest, ...]
    images: dict[str, bytes] = field(repr=False)
    mutated: tuple[str, ...]
    arch: str
    driver: int
