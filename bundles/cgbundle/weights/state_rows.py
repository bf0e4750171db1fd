"""State whose number of rows `load` chooses: how many there are, and where the state lies then."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CallError, OutOfMemory, meant
from ..format.limits import STATE_ROWS
from ..format.records import replace
from ..format.safetensors import ALIGNMENT
from ..format.schema import MEMORIES, STATE, Manifest, StateDimension, Weight
from ..format.spans import span

if TYPE_CHECKING:
    from ..tables.table import Table

SHARE, HOST_SHARE = 0.9, 0.5
"""Of the free memory of a GPU, and of a host, the part that state takes of itself: a GPU needs some for graphs and outputs, a host
for everybody else."""

PAD = 256
"""Bytes behind the last row of state on a GPU that belong to nobody."""


class Room(NamedTuple):
    """Bytes of memory that are free for state, of which it takes `share` where nobody says how many rows there are; and of what."""

    free: int
    share: float
    where: str


def host_room(free: int) -> Room:
    """Of this machine's memory, of which the process may have `free` bytes."""
    return Room(free, HOST_SHARE, "the machine")


def gpu_room(free: int, memories: Mapping[str, int]) -> Room:
    """Of a GPU with `free` bytes, where no memory of the bundle is allocated yet."""
    others = sum(size for name, size in memories.items() if name not in (STATE, "host"))
    return Room(max(0, free - others), SHARE, "beside the weights and temporaries the GPU")


def resized(manifest: Manifest, asked: Mapping[str, int], room: Room) -> Manifest:
    """The manifest with as many rows of state as are asked for, by dimension, and for others as many as memory allows.  Raises
    state-rows, out-of-memory."""
    dimensions, weights = manifest.state_dimensions, manifest.weights
    rows = {dimension.name: _checked(dimension, least_rows(dimension, weights), asked) for dimension in dimensions}
    known = [dimension.name for dimension in dimensions]
    for name in asked:
        if name not in known:
            has = f"it has {', '.join(map(repr, known))}" if known else "it has none"
            text = f"state {name!r}: program {manifest.name!r} has no such dimension of its state{meant(name, known)}: {has}"
            raise CallError("state-rows", text)
    bytes_of = {dimension.name: sum(_row_bytes(weights[index]) for index in dimension.weights) for dimension in dimensions}
    if open_ := [dimension for dimension in dimensions if dimension.name not in asked]:
        others = _laid_out(manifest, rows).bytes  # all that the numbers above take
        rows |= _shared(open_, rows, bytes_of, int(room.free * room.share) - others)
    layout = _laid_out(manifest, rows)
    if layout.bytes > room.free:
        numbers = ", ".join([f"{name}={number}" for name, number in rows.items()])
        text = f"state {numbers}: needs {layout.bytes:,} bytes, {room.where} has {room.free:,} free"
        raise OutOfMemory("out-of-memory", text, "give smaller numbers to load(..., state=...)" if asked else "")
    memories = tuple([(name, layout.bytes if name == STATE else size) for name, size in manifest.memories])
    return replace(manifest, weights=layout.weights, memories=memories)


def least_rows(dimension: StateDimension, weights: Sequence[Weight]) -> int:
    """The number of rows in a manifest: in the bundle's own, with which it was built."""
    return weights[dimension.weights[0]].shape[0]


class Relocation:
    """What lies in state of a bundle's own manifest, `built`, to where it lies after `resized`."""

    __slots__ = ("_begins", "_shifts")

    def __init__(self, built: Manifest, now: Manifest) -> None:
        places = sorted(
            [(built.weights[at].offset, now.weights[at].offset) for dimension in built.state_dimensions for at in dimension.weights]
        )
        self._begins, self._shifts = [old for old, _ in places], [new - old for old, new in places]

    def moved(self, table: Table) -> Table:
        """A recording over the state that lies there now.  Kernels alone touch state that varies."""
        if not any(self._shifts):
            return table
        moved, state, offsets = copy(table), MEMORIES.index(STATE), array("Q", table.relocation_offset.tobytes())
        for row, memory in enumerate(bytes(table.relocation_memory)):
            if memory == state and offsets[row] >= self._begins[0]:
                offsets[row] += self._shifts[bisect_right(self._begins, offsets[row]) - 1]
        setattr(moved, "relocation_offset", memoryview(offsets))  # noqa: B010  a slot that type checkers do not know
        return moved


# --- inside -------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    weights: tuple[Weight, ...]
    bytes: int


def _checked(dimension: StateDimension, least: int, asked: Mapping[str, int]) -> int:
    number = asked.get(dimension.name, least)
    if not least <= number <= STATE_ROWS:
        bound = f"at least {least}, with which it was built" if number < least else f"at most {STATE_ROWS:,}"
        raise CallError("state-rows", f"state {dimension.name!r}: {number} rows, expected {bound}")
    return number


def _shared(
    dimensions: Sequence[StateDimension], least: Mapping[str, int], bytes_of: Mapping[str, int], free: int
) -> dict[str, int]:
    """How many rows each takes of `free` bytes beside the least: all take equal parts, and what one does not need goes to the
    others."""

    def needed(dimension: StateDimension) -> float:
        more = None if dimension.most is None else dimension.most - least[dimension.name]
        return float("inf") if more is None else more * bytes_of[dimension.name]

    rows, left = {}, max(0, free)
    waiting = sorted(dimensions, key=needed)
    for place, dimension in enumerate(waiting):
        part = min(needed(dimension), left // (len(waiting) - place))
        more = int(part // bytes_of[dimension.name]) if bytes_of[dimension.name] else 0
        rows[dimension.name] = min(least[dimension.name] + more, STATE_ROWS)
        left -= (rows[dimension.name] - least[dimension.name]) * bytes_of[dimension.name]
    return rows


def _laid_out(manifest: Manifest, rows: Mapping[str, int]) -> _Layout:
    """State with these numbers of rows, in the order of the bundle, behind what does not vary."""
    weights = list(manifest.weights)
    number_of = {at: rows[dimension.name] for dimension in manifest.state_dimensions for at in dimension.weights}
    order = sorted(number_of, key=lambda at: weights[at].offset)
    end = weights[order[0]].offset
    for at in order:
        row = weights[at]
        weights[at] = replace(row, shape=(number_of[at], *row.shape[1:]), offset=end)
        end += -(-span(weights[at]) // ALIGNMENT) * ALIGNMENT
    return _Layout(tuple(weights), end + PAD)


def _row_bytes(weight: Weight) -> int:
    return span(weight) // weight.shape[0]
