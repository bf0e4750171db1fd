"""Where the ranges of a take lie in a bundle: tables in memory `weights`, pool segments and scratch in the arena.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cgbundle.format.schema import MEMORIES, DonatedRange, IntKey
from cgbundle.tables.module_state import Address

from ..errors import ModelError
from ..targets.cuda.donations import reserved_end, reserved_parts
from ..targets.memory_layout import ALIGN, PAD, Table, align
from .pairing import KEPT, Pairing, agree
from .take import Reading, Take

SEGMENT_ALIGN = 2 << 20
"""torch's segments start at multiples of 2 MiB; kept, so that an arena has the alignment that the kernels were chosen for."""


LARGEST_TABLE = 256 << 20
"""A table that no tensor of the program holds may have this many bytes; larger ones are refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Range of the first recording -> (memory as a position in MEMORIES, offset of the range in it), for one key."""

    bases: dict[int, tuple[int, int]]
    arena: int

    def address(self, target: Reading) -> Address:
        """The place in a memory that a target means.  Raises KeyError for a range that was not placed."""
        memory, base = self.bases[target.range]
        return Address(memory=memory, offset=base + target.offset)


def place_tables(
    a: Take, b: Take, pairing: Pairing, used: Iterable[int], end: int
) -> tuple[tuple[Table, ...], dict[int, int], int]:
    """Constants among the used "torch" and "device" ranges: those with equal contents in both processes.  Returns the tables, range
    -> offset in `weights`, and the new end of `weights`.  Any other range is scratch, which goes into the arena.  Raises
    pointer-in-table, memory-refused."""
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


def place(
    take: Take,
    used: Iterable[int],
    tables: Mapping[int, int],
    key: IntKey,
    kept: Mapping[int, int] = MappingProxyType({}),
    start: int = 0,
) -> Placement:
    """Place the ranges that the graph of one key refers to, in the order of their first use, in the arena from `start` on.  `kept`
    have an offset there."""
    bases = {i: (MEMORIES.index(piece.kind), piece.offset) for i, piece in enumerate(take.ranges) if piece.kind in KEPT}
    bases |= {i: (MEMORIES.index("arena"), offset) for i, offset in kept.items()}
    arena = start
    for i in used:
        piece = take.ranges[i]
        if i in bases:
            continue
        if i in tables:
            bases[i] = (MEMORIES.index("weights"), tables[i])
        elif piece.kind in ("pool", "torch", "device"):
            arena = align(arena, SEGMENT_ALIGN if piece.size >= SEGMENT_ALIGN else ALIGN)
            bases[i] = (MEMORIES.index("arena"), arena)
            arena += piece.size
        else:
            raise ModelError("memory-refused", f"int_key {key} refers to {piece.kind} memory")
    return Placement(bases=bases, arena=arena + PAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The segments that outputs lie in which a later call takes where they lie.  `offsets`: by key, range -> offset in the arena.
    `start`: where the arena of all keys begins."""

    reserved: tuple[DonatedRange, ...]
    offsets: Mapping[IntKey, Mapping[int, int]]
    start: int


def keep(take: Take, held: Mapping[IntKey, tuple[str, Sequence[int]]]) -> Kept:
    """Places the ranges that hold the donated outputs, given the entry of every key and these ranges.

    A range is a whole segment of torch's allocator: temporaries of the program may have lain where the output does.
    """
    relative_offsets: dict[IntKey, dict[int, int]] = {}
    needs: dict[str, int] = {}
    for key, (entry, ranges) in held.items():
        places, end = relative_offsets.setdefault(key, {}), 0
        for i in dict.fromkeys(ranges):
            size = take.ranges[i].size
            places[i] = align(end, SEGMENT_ALIGN if size >= SEGMENT_ALIGN else ALIGN)
            end = places[i] + size
        needs[entry] = max(needs.get(entry, 0), end)
    reserved = reserved_parts(needs, SEGMENT_ALIGN)
    begins = {row.entry: row.offset for row in reserved}
    offsets = {key: {i: begins[entry] + at for i, at in relative_offsets[key].items()} for key, (entry, _) in held.items()}
    return Kept(reserved=reserved, offsets=offsets, start=reserved_end(reserved, SEGMENT_ALIGN))


def _pointers(a: Take, b: Take, pairing: Pairing, i: int) -> list[int]:
    """Offsets of the words of a range's contents that are the same live address in both processes."""
    theirs = {word.at: word for word in b.ranges[pairing[i]].words}
    return [w.at for w in a.ranges[i].words if w.at in theirs and agree(w, theirs[w.at], pairing) is not None]
