"""Weights and initial state in memory of this process: in the mapped file, or in memory that an update allocated."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CallError, OutOfMemory, did_you_mean
from ..format.archive import Archive
from ..format.file_names import WEIGHTS
from ..format.limits import STATE_ROWS
from ..format.records import replace
from ..format.safetensors import ALIGNMENT
from ..format.safetensors_files import Mapped
from ..format.schema import STATE, Manifest, StateDimension, Weight
from ..format.shapes import span

if TYPE_CHECKING:
    from ..call.update import Contents

CACHE_LINE = 64  # bytes: a cache line, and AOTInductor's alignment of constants (AOTI_CONST_ALIGNMENT)


class HostWeights:
    """Addresses of one version of all weights, valid while this object lives. `moved`: by tensor, (address, owner) of updated
    weights; others are in `mapped`."""

    __slots__ = ("_mapped", "_moved")

    def __init__(self, mapped: Mapped, moved: Mapping[str, tuple[int, object]] = MappingProxyType({})) -> None:
        self._mapped, self._moved = mapped, moved

    def address(self, tensor: str) -> int:
        moved = self._moved.get(tensor)
        return self._mapped.address(tensor) if moved is None else moved[0]

    def populate(self) -> None:
        self._mapped.populate()

    def updated(self, rows: Sequence[Weight], contents: Sequence[Contents]) -> HostWeights:
        sizes = [-(-value.bytes // CACHE_LINE) * CACHE_LINE for value in contents]
        memory = anonymous(sum(sizes))
        place, moved = ctypes.addressof(memory), dict(self._moved)
        for row, value, size in zip(rows, contents, sizes, strict=True):
            value.near().copy_to(place, row)
            moved[row.tensor] = (place, memory)
            place += size
        return HostWeights(self._mapped, moved)


def anonymous(size: int) -> Any:
    """Zeros in anonymous memory, page-aligned and allocated on first use."""
    return (ctypes.c_char * max(1, size)).from_buffer(mmap.mmap(-1, max(1, size)))


class StateRow(NamedTuple):
    """`size` bytes at `offset` of memory state; `source`: address of their initial contents, 0 for zeros."""

    offset: int
    size: int
    source: int


class InitialState:
    """Initial contents of the state, except random numbers: `rows`, valid while this object lives. `manifest` has the chosen rows
    of state. Raises weights-invalid."""

    __slots__ = ("_counts", "_mapped", "rows")

    def __init__(self, bundle: Archive, manifest: Manifest) -> None:
        weights = manifest.weights
        state = [row for index, row in enumerate(weights) if row.memory == STATE and index != manifest.random]
        self._mapped: Mapped | None = bundle.mapped(WEIGHTS) if any(not row.zeros for row in state) else None
        self.rows = [
            StateRow(row.offset, span(row), 0 if row.zeros or self._mapped is None else self._mapped.address(row.tensor))
            for row in state
        ]
        dimensions = [row for row in manifest.state_dimensions if row.count is not None]
        self._counts = (ctypes.c_int64 * len(dimensions))(*[weights[row.weights[0]].shape[0] for row in dimensions])
        for place, dimension in enumerate(dimensions):
            row = weights[dimension.count or 0]
            self.rows[state.index(row)] = StateRow(row.offset, 8, ctypes.addressof(self._counts) + 8 * place)


# --- state whose number of rows `load` chooses ---------------------------------------------------------------------------


SHARE, HOST_SHARE = 0.9, 0.5
"""Shares of the free memory that state takes by default: a GPU needs some for graphs and outputs, a host for other processes."""

PAD = 256  # unused bytes after the last row of state on a GPU


class Room(NamedTuple):
    free: int
    share: float
    where: str


def host_room(free: int) -> Room:
    return Room(free, HOST_SHARE, "the machine")


def gpu_room(free: int, memories: Mapping[str, int]) -> Room:
    """Room on a GPU with `free` bytes, before the bundle's memories are allocated."""
    others = sum(size for name, size in memories.items() if name not in (STATE, "host"))
    return Room(max(0, free - others), SHARE, "beside the weights and temporaries the GPU")


def resized(manifest: Manifest, requested: Mapping[str, int], room: Room) -> Manifest:
    """The manifest with the requested rows of state, and for other dimensions as many as memory allows. Raises state-rows,
    out-of-memory."""
    dimensions, weights = manifest.state_dimensions, manifest.weights
    rows = {}
    for dimension in dimensions:
        least = least_rows(dimension, weights)
        number = rows[dimension.name] = requested.get(dimension.name, least)
        if not least <= number <= STATE_ROWS:
            bound = f"at least {least}, with which it was built" if number < least else f"at most {STATE_ROWS:,}"
            raise CallError("state-rows", f"state {dimension.name!r}: {number} rows, expected {bound}")
    for name in requested:
        if name not in rows:
            has = f"it has {', '.join(map(repr, rows))}" if rows else "it has none"
            text = f"state {name!r}: program {manifest.name!r} has no such dimension of its state{did_you_mean(name, rows)}: {has}"
            raise CallError("state-rows", text)
    if unspecified := [dimension for dimension in dimensions if dimension.name not in requested]:
        sizes = {row.name: sum(span(weights[at]) // weights[at].shape[0] for at in row.weights) for row in dimensions}
        _, others = _laid_out(manifest, rows)  # bytes of state with these rows
        rows |= _shared(unspecified, rows, sizes, int(room.free * room.share) - others)
    laid_out, size = _laid_out(manifest, rows)
    if size > room.free:
        numbers = ", ".join([f"{name}={number}" for name, number in rows.items()])
        text = f"state {numbers}: needs {size:,} bytes, {room.where} has {room.free:,} free"
        raise OutOfMemory("out-of-memory", text, "give smaller numbers to load(..., state=...)" if requested else "")
    memories = tuple([(name, size if name == STATE else others) for name, others in manifest.memories])
    return replace(manifest, weights=laid_out, memories=memories)


def least_rows(dimension: StateDimension, weights: Sequence[Weight]) -> int:
    return weights[dimension.weights[0]].shape[0]


def _shared(
    dimensions: Sequence[StateDimension], least: Mapping[str, int], bytes_of: Mapping[str, int], free: int
) -> dict[str, int]:
    """Rows of each dimension, with `free` bytes for rows above the minimum: equal parts, unneeded bytes go to the others."""

    def needed(dimension: StateDimension) -> float:
        return inf if dimension.most is None else (dimension.most - least[dimension.name]) * bytes_of[dimension.name]

    rows, free, waiting = {}, max(0, free), sorted(dimensions, key=needed)
    for place, dimension in enumerate(waiting):
        name, size = dimension.name, bytes_of[dimension.name]
        part = min(needed(dimension), free // (len(waiting) - place))
        rows[name] = min(least[name] + (int(part // size) if size else 0), STATE_ROWS)
        free -= (rows[name] - least[name]) * size
    return rows


def _laid_out(manifest: Manifest, rows: Mapping[str, int]) -> tuple[tuple[Weight, ...], int]:
    """The weights with these rows of state, in the bundle's order, after fixed state; and the bytes of all state."""
    weights = list(manifest.weights)
    number_of = {at: rows[dimension.name] for dimension in manifest.state_dimensions for at in dimension.weights}
    order = sorted(number_of, key=lambda at: weights[at].offset)
    end = weights[order[0]].offset
    for at in order:
        weights[at] = replace(weights[at], shape=(number_of[at], *weights[at].shape[1:]), offset=end)
        end += -(-span(weights[at]) // ALIGNMENT) * ALIGNMENT
    return tuple(weights), end + PAD
