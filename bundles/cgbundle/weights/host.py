"""Weights and initial state in memory of this process: in the mapped file, or where an update put them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..format.archive import Archive
from ..format.file_names import WEIGHTS
from ..format.safetensors import Mapped
from ..format.schema import STATE, Manifest, Weight
from ..format.spans import span

if TYPE_CHECKING:
    from .update import Contents

ALIGNMENT = 64  # bytes: a cache line, and AOTInductor's alignment of constants (AOTI_CONST_ALIGNMENT)


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
        """New weights, some with other contents, which are copied to new memory, from a GPU if necessary."""
        sizes = [-(-value.bytes // ALIGNMENT) * ALIGNMENT for value in contents]
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
