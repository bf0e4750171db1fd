"""Recordings over other addresses than those of the build: inputs that a call of another entry left in the arena, tensors of an
engine, and state with other numbers of rows."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from ..format.file_names import all_programs
from ..format.records import replace
from ..format.schema import MEMORIES, STATE, Manifest, Program
from ..format.shapes import extent, span
from ..format.table import Table
from ..validate.state import donating_programs

Places = tuple[tuple[int, int], ...]
"""Donated inputs that a launch reads in place: (position, offset in memory arena)."""

_PLACES = (("relocation_memory", "relocation_offset"), ("memset_memory", "memset_offset"), ("memcpy_memory", "memcpy_offset"))
"""The columns with addresses: memories, and offsets into them in bytes."""


class Move(NamedTuple):
    """Bytes [begin, end) of `memory` that are at `offset` of memory `to` during a launch. Memories are positions in MEMORIES."""

    memory: int
    begin: int
    end: int
    to: int
    offset: int


def moved(table: Table, moves: Sequence[Move]) -> Table | None:
    """The recording with addresses changed by `moves`, which do not overlap; None if no address changes."""
    result, changed = copy(table), False
    ordered = sorted(moves)
    begins = [(move.memory, move.begin) for move in ordered]
    for memories, offsets in _PLACES:
        places, starts = array("B", getattr(table, memories).tobytes()), array("Q", getattr(table, offsets).tobytes())
        for row, place in enumerate(zip(places, starts, strict=True)):
            at = bisect_right(begins, place) - 1
            if at < 0 or place[0] != ordered[at].memory or place[1] >= ordered[at].end:
                continue
            move = ordered[at]
            places[row], starts[row], changed = move.to, move.offset + place[1] - move.begin, True
        setattr(result, memories, memoryview(places))
        setattr(result, offsets, memoryview(starts))
    return result if changed else None


def donated_places(manifest: Manifest) -> dict[int, dict[int, dict[int, int]]]:
    """{program: {input position: {offset in memory arena: source program}}} of donated outputs of other entries. Outputs of the
    same entry are copied, because the call overwrites them."""
    programs = all_programs(manifest)
    places: dict[int, dict[int, dict[int, int]]] = {}
    for donation, source, target in donating_programs(manifest):
        value = programs[source].values[programs[source].outputs[donation.output]]
        if donation.source != donation.target and span(value):
            places.setdefault(target, {}).setdefault(donation.input, {})[value.offset] = source
    return places


def with_inputs_at(program: Program, places: Places) -> tuple[Program, tuple[Move, ...]]:
    """The program with inputs in memory arena, and the moves of its recordings. A kernel may have the address after an input's last
    byte: it moves too, unless another input starts there."""
    arena, inputs = MEMORIES.index("arena"), MEMORIES.index("inputs")
    begins = {program.values[index].offset for index in program.inputs}
    values, moves = list(program.values), []
    for position, offset in places:
        index = program.inputs[position]
        begin, end = extent(values[index])
        moves.append(Move(inputs, begin, end + (end not in begins), arena, offset))
        values[index] = replace(values[index], memory="arena", offset=offset)
    return replace(program, values=tuple(values)), tuple(moves)


class Relocation:
    """Moves addresses of state from the layout of `built`, the bundle's manifest, to that of `now`."""

    __slots__ = ("_begins", "_shifts")

    def __init__(self, built: Manifest, now: Manifest) -> None:
        places = sorted(
            [(built.weights[at].offset, now.weights[at].offset) for dimension in built.state_dimensions for at in dimension.weights]
        )
        self._begins, self._shifts = [old for old, _ in places], [new - old for old, new in places]

    def moved(self, table: Table) -> Table:
        """The recording with moved addresses. Only kernels access variable state."""
        if not any(self._shifts):
            return table
        moved, state, offsets = copy(table), MEMORIES.index(STATE), array("Q", table.relocation_offset.tobytes())
        for row, memory in enumerate(bytes(table.relocation_memory)):
            if memory == state and offsets[row] >= self._begins[0]:
                offsets[row] += self._shifts[bisect_right(self._begins, offsets[row]) - 1]
        setattr(moved, "relocation_offset", memoryview(offsets))  # noqa: B010  a slot that type checkers do not know
        return moved
