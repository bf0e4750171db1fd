"""Where everything lies: weights, tables, static inputs and the arena.  Pure; offsets and sizes in bytes.

*weights*: every parameter, buffer and constant of the program at 256-byte aligned offsets, tied ones once, but for the buffers
that the program writes to, which lie in *state*; behind them
the tables that kernels read but no tensor of the program holds (cuFFT's twiddle factors, constants that Inductor folded).
*inputs*: the tensors of the call, each key from offset 0: keys overlay each other.
*arena*: the segments of a key's private pool that its graph refers to, and scratch that libraries allocated elsewhere; keys
overlay each other, so a bundle needs the largest, not the sum.

Each memory ends with PAD bytes that belong to nobody: an address one past the end of the last tensor stays inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cgbundle.format.schema import DTYPES, MEMORIES, Weight
from cgbundle.tables.recording import Address

from ...capture.pairing import Pairing, agree
from ...capture.rows import INPUTS, WEIGHTS, Key, Take, Target
from ...errors import ModelError

ALIGN = 256
PAD = 256
SEGMENT_ALIGN = 2 << 20
"""torch's segments start at multiples of 2 MiB; kept, so that an arena has the alignment that the kernels were chosen for."""

LARGEST_TABLE = 256 << 20
"""A table that no tensor of the program holds may have this many bytes; larger ones are refused."""


def align(value: int, to: int = ALIGN) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A tensor without its contents: what `lay_out` needs.  `same_as` names an earlier tensor that is the same memory, or ""."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    same_as: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Constant contents at `offset` of memory `weights` that no tensor of the program holds."""

    offset: int
    contents: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Range of the first recording -> (memory as a position in MEMORIES, offset of the range in it), for one key."""

    bases: dict[int, tuple[int, int]]
    arena: int

    def address(self, target: Target) -> Address:
        """The place in a memory that a target means.  Raises KeyError for a range that was not placed."""
        memory, base = self.bases[target.range]
        return Address(memory=memory, offset=base + target.offset)


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor."""
    size = DTYPES[dtype]
    for n in shape:
        size *= n
    return size


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides` where they describe a dense tensor without overlaps (any order of axes), else those of a contiguous one."""
    expected = 1
    for n, stride in sorted(((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda axis: (axis[1], axis[0])):
        if stride != expected:
            break
        expected *= n
    else:
        return strides
    contiguous = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        contiguous[i] = contiguous[i + 1] * max(shape[i + 1], 1)
    return tuple(contiguous)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Bytes up to the end of the last tensor of memory `weights` and of memory `state`."""

    weights: int
    state: int


def lay_out(shapes: Mapping[str, Shape], state: Collection[str] = ()) -> tuple[tuple[Weight, ...], Ends]:
    """Offsets of the program's tensors, in their order: those named in `state` in memory `state`, the others in `weights`."""
    rows: list[Weight] = []
    offsets: dict[str, int] = {}
    ends = {"weights": 0, "state": 0}
    for name, s in shapes.items():
        tensor = s.same_as or name
        memory = "state" if name in state else "weights"
        if tensor not in offsets:
            offsets[tensor] = ends[memory]
            ends[memory] = align(ends[memory] + tensor_bytes(s.dtype, s.shape))
        rows.append(
            Weight(name=name, tensor=tensor, dtype=s.dtype, shape=s.shape, strides=s.strides, memory=memory, offset=offsets[tensor])
        )
    return tuple(rows), Ends(**ends)


def place_tables(
    a: Take, b: Take, pairing: Pairing, used: Iterable[int], end: int
) -> tuple[tuple[Table, ...], dict[int, int], int]:
    """Constants among the used "torch" and "device" ranges: those with equal contents in both processes.

    Returns the tables, range -> offset in `weights`, and the new end of `weights`.  A range that is missing in the
    result has contents of its own in every process: scratch, which goes into the arena.  Raises pointer-in-table, memory-refused.
    """
    tables: list[Table] = []
    offsets: dict[int, int] = {}
    for i in used:
        mine = a.ranges[i]
        if mine.kind not in ("torch", "device"):
            continue
        theirs = b.ranges[pairing[i]]
        if len(mine.contents) != mine.size or len(theirs.contents) != mine.size:
            raise ModelError(
                "memory-refused", f"a kernel refers to an allocation of {mine.size} bytes outside the program's memory"
            )
        pointers = _pointers(a, b, pairing, i)
        blank = [bytearray(mine.contents), bytearray(theirs.contents)]
        for at in pointers:
            for data in blank:
                data[at : at + 8] = bytes(8)
        if blank[0] != blank[1]:
            continue
        if pointers:
            raise ModelError(
                "pointer-in-table",
                f"an allocation of {mine.size} bytes that kernels read holds an address itself, at byte {pointers[0]}",
            )
        tables.append(Table(offset=end, contents=mine.contents))
        offsets[i] = end
        end = align(end + mine.size)
    return tuple(tables), offsets, end


def place(take: Take, used: Iterable[int], tables: Mapping[int, int], key: Key) -> Placement:
    """Place the ranges that the graph of one key refers to, in the order of their first use."""
    bases = {WEIGHTS: (MEMORIES.index("weights"), 0), INPUTS: (MEMORIES.index("inputs"), 0)}
    arena = 0
    for i in used:
        piece = take.ranges[i]
        if i in bases:
            continue
        if i in tables:
            bases[i] = (MEMORIES.index("weights"), tables[i])
        elif piece.kind == "state":
            bases[i] = (MEMORIES.index("state"), 0)
        elif piece.kind in ("pool", "torch", "device"):
            arena = align(arena, SEGMENT_ALIGN if piece.size >= SEGMENT_ALIGN else ALIGN)
            bases[i] = (MEMORIES.index("arena"), arena)
            arena += piece.size
        else:
            raise ModelError("memory-refused", f"int_key {key} refers to {piece.kind} memory")
    return Placement(bases=bases, arena=arena + PAD)


def _pointers(a: Take, b: Take, pairing: Pairing, i: int) -> list[int]:
    """Offsets of the words of a range's contents that are the same live address in both processes."""
    theirs = {word.at: word for word in b.ranges[pairing[i]].words}
    return [w.at for w in a.ranges[i].words if w.at in theirs and agree(w, theirs[w.at], pairing) is not None]
