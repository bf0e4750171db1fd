"""Plain data that a recorder process hands to its parent: one process's view of the captured graphs.  Addresses are kept raw in the
blocks, and as *targets*, (range, offset) pairs into the process's own `Range` table.  A word has every reading that is possible:
inside one range, and one past the end of another before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cgbundle.format.schema import IntKey

from ..util.tolerance import Difference

WEIGHTS, INPUTS = 0, 1
"""The first two ranges of a recorder process: its weights buffer and its static inputs.  Its state buffer, where it has one, is
next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One reading of an address: `offset` bytes into range `range` of the process's table (offset = size: one past the end)."""

    range: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """The 8 bytes at `at` of a block are a live address, with these readings; the first is the likeliest."""

    at: int
    readings: tuple[Reading, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A piece of device memory that an address may lie in.

    `kind`: "weights", "inputs" and "state" are ours, and begin at `offset` of that memory; of an engine "inputs" are its tensors.
    "pool" is a segment of the private pool of `key` (None: of every graph), "torch" a live block of torch's ordinary pool, "device"
    an allocation that torch did not make, "host" pinned host memory.  `contents` is what a "torch" or "device" range held before
    any graph ran, if something refers to it; `words` are the live addresses in it.
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
    """What a live address lies in: `kind` "device" or "host", start and size in bytes of the allocation (0, 0 for host memory)."""

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
    """A kernel node; `image` is a sha256, attributes are (number, value or values) as in schema.Function and schema.KernelNode.
    `line`: the file:line of the Python that launched it, where it is known."""

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
    """A memset node; `shape` is (value, element, width, height, pitch) as in schema.MemsetNode."""

    target: Word
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawMemcpy:
    """A device-to-device copy; `shape` is (width, height, depth, source pitch and height, target pitch and height)."""

    source: Word
    target: Word
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawEmpty:
    """An empty node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSetCondition:
    """The byte at an address becomes the condition of branch or loop number `conditional` of the graph."""

    conditional: int
    byte: Word


@dataclass(frozen=True, kw_only=True, slots=True)
class RawBegin:
    """What follows is the first body of a branch or a loop; `type` as in ConditionalNode."""

    conditional: int
    type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RawNextBody:
    """What follows is its next body."""

    conditional: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RawEnd:
    """Its last body ends."""

    conditional: int


RawNode = RawKernel | RawMemset | RawMemcpy | RawEmpty
"""A node as the driver has it."""

RawRow = RawNode | RawSetCondition | RawBegin | RawNextBody | RawEnd
"""A node, or where a branch or a loop of the recording is: everything between two of these is one graph that was captured."""

RawEdge = tuple[int, int, int, int, int]
"""(source, target, from_port, to_port, type), of two rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawValue:
    """A tensor of the call: dtype name of schema.DTYPES, shape and strides in elements, and where it lies."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: Word


@dataclass(frozen=True, kw_only=True, slots=True)
class RawGraph:
    """Captured region number `region` of its key; `edges` join nodes of one captured graph, the rest are its tensors.  `name`: what
    messages call it, where it has no int_key."""

    key: IntKey
    nodes: tuple[RawRow, ...]
    edges: tuple[RawEdge, ...]
    inputs: tuple[RawValue, ...]
    outputs: tuple[RawValue, ...]
    region: int = 0
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawModuleState:
    """A variable of an image that no longer holds its initial bytes."""

    image: str
    symbol: str
    block: Block


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSelfTest:
    """A replay on the self-test's inputs: contents as in ReplayedBytes.  `differences` from eager PyTorch are those of the outputs,
    the inputs that the program writes to, and state, in this order, and `indices` as in `near_ties.judge.Verdict`.  `steady`: more
    replays gave the same bits."""

    key: IntKey
    outputs: tuple[bytes, ...]
    differences: tuple[Difference, ...]
    written: tuple[bytes, ...] = ()
    state: tuple[tuple[str, bytes, bytes], ...] = ()
    indices: tuple[tuple[int, int], ...] = ()
    steady: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """Everything that one recorder process saw.  `mutated`: weights outside state that a replay changes."""

    ranges: tuple[Range, ...]
    graphs: tuple[RawGraph, ...]
    states: tuple[RawModuleState, ...]
    self_tests: tuple[RawSelfTest, ...]
    images: dict[str, bytes] = field(repr=False)
    mutated: tuple[str, ...]
    arch: str
    driver: int
