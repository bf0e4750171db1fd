"""Places the ranges of a take in the memories of a bundle: tables in `weights`, pool segments and scratch in `arena`.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cgbundle.format.schema import MEMORIES, DonatedRange, IntKey
from cgbundle.validate.module_state import Address

from ..errors import ModelError
from ..targets.cuda.donations import reserved_end, reserved_parts
from ..targets.memory_layout import ALIGN, PAD, Table, align
from .pairing import KEPT, Pairing, agree
from .take import Reading, Take

SEGMENT_ALIGN = 2 << 20
"""torch's segments start at multiples of 2 MiB.  The arena keeps this alignment: kernels may have been chosen for it."""

LARGEST_TABLE = 256 << 20
"""Most bytes of a table; a larger constant outside the program's memory is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """For one key, `bases`: range of the first take -> (index in MEMORIES, offset in that memory).  `arena`: its size in bytes."""

    bases: dict[int, tuple[int, int]]
    arena: int

    def address(self, target: Reading) -> Address:
        """Returns the memory and offset of a reading.  Raises KeyError for a range that was not placed."""
        memory, base = self.bases[target.range]
        return Address(memory=memory, offset=base + target.offset)


def place_tables(
    a: Take, b: Take, pairing: Pairing, used: Iterable[int], end: int
) -> tuple[tuple[Table, ...], dict[int, int], int]:
    """Makes tables of the "torch" and "device" ranges in `used` whose contents are equal in both processes.

    Other ranges are scratch, which `place` puts into the arena.  `end`: end of memory `weights` before the tables.  Returns the
    tables, range -> offset in `weights`, and the new end.  Raises pointer-in-table, memory-refused."""
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
    """Places the ranges that the graphs of one key use, in the order of first use, in the arena from offset `start` on.  `kept`:
    ranges that have an offset in the arena already.  Raises memory-refused."""
    bases = {
        i: (MEMORIES.index(memory_range.kind), memory_range.offset)
        for i, memory_range in enumerate(take.ranges)
        if memory_range.kind in KEPT
    }
    bases |= {i: (MEMORIES.index("arena"), offset) for i, offset in kept.items()}
    arena = start
    for i in used:
        memory_range = take.ranges[i]
        if i in bases:
            continue
        if i in tables:
            bases[i] = (MEMORIES.index("weights"), tables[i])
        elif memory_range.kind in ("pool", "torch", "device"):
            arena = align(arena, SEGMENT_ALIGN if memory_range.size >= SEGMENT_ALIGN else ALIGN)
            bases[i] = (MEMORIES.index("arena"), arena)
            arena += memory_range.size
        else:
            raise ModelError("memory-refused", f"int_key {key} refers to {memory_range.kind} memory")
    return Placement(bases=bases, arena=arena + PAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Segments that hold donated outputs, which a later call reads in place.  `offsets`: by key, range -> offset in the arena.
    `start`: offset in the arena where the other ranges of all keys begin."""

    reserved: tuple[DonatedRange, ...]
    offsets: Mapping[IntKey, Mapping[int, int]]
    start: int


def keep(take: Take, donated: Mapping[IntKey, tuple[str, Sequence[int]]]) -> Kept:
    """Places the ranges that hold donated outputs.  `donated`: by key, the name of its entry and these ranges.

    Each range is a whole segment of torch's allocator, because temporaries may have used the same addresses as the output.
    """
    relative_offsets: dict[IntKey, dict[int, int]] = {}
    needs: dict[str, int] = {}
    for key, (entry, ranges) in donated.items():
        places, end = relative_offsets.setdefault(key, {}), 0
        for i in dict.fromkeys(ranges):
            size = take.ranges[i].size
            places[i] = align(end, SEGMENT_ALIGN if size >= SEGMENT_ALIGN else ALIGN)
            end = places[i] + size
        needs[entry] = max(needs.get(entry, 0), end)
    reserved = reserved_parts(needs, SEGMENT_ALIGN)
    begins = {row.entry: row.offset for row in reserved}
    offsets = {key: {i: begins[entry] + at for i, at in relative_offsets[key].items()} for key, (entry, _) in donated.items()}
    return Kept(reserved=reserved, offsets=offsets, start=reserved_end(reserved, SEGMENT_ALIGN))


def _pointers(a: Take, b: Take, pairing: Pairing, i: int) -> list[int]:
    """Returns the offsets of the words in range `i`'s contents that are an address of the same place in both processes."""
    theirs = {word.at: word for word in b.ranges[pairing[i]].words}
    return [w.at for w in a.ranges[i].words if w.at in theirs and agree(w, theirs[w.at], pairing) is not None]
