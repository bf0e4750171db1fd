"""Weights and initial state in memory of this process: in the mapped file, or where an update has put them."""

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

ALIGNMENT = 64
"""Bytes: a cache line, and what AOTInductor gives a constant (AOTI_CONST_ALIGNMENT)."""


class HostWeights:
    """The addresses of all weights at one time.  They stay while this object lives.

    `moved`: by tensor, where an update has put it, and what keeps that memory; the others lie in `mapped`.
    """

    __slots__ = ("_mapped", "_moved")

    def __init__(self, mapped: Mapped, moved: Mapping[str, tuple[int, object]] = MappingProxyType({})) -> None:
        self._mapped, self._moved = mapped, moved

    def address(self, tensor: str) -> int:
        moved = self._moved.get(tensor)
        return self._mapped.address(tensor) if moved is None else moved[0]

    def populate(self) -> None:
        """Brings what lies in the file into memory of this process."""
        self._mapped.populate()

    def updated(self, rows: Sequence[Weight], contents: Sequence[Contents]) -> HostWeights:
        """The weights with other contents for some, copied to memory of our own; those that lie on a GPU are fetched."""
        sizes = [-(-value.bytes // ALIGNMENT) * ALIGNMENT for value in contents]
        memory = anonymous(sum(sizes))
        place, moved = ctypes.addressof(memory), dict(self._moved)
        for row, value, size in zip(rows, contents, sizes, strict=True):
            value.near().copy_to(place, row)
            moved[row.tensor] = (place, memory)
            place += size
        return HostWeights(self._mapped, moved)


def anonymous(size: int) -> Any:
    """Zeros in memory of no file, which the system gives when they are first used, at the start of a page."""
    return (ctypes.c_char * max(1, size)).from_buffer(mmap.mmap(-1, max(1, size)))


class StateRow(NamedTuple):
    """`size` bytes at `offset` of memory state; `source` is where their initial contents lie in this process, 0 for zeros."""

    offset: int
    size: int
    source: int


class InitialState:
    """The initial contents of a bundle's state but that of the random numbers: `rows`, valid while this object lives.  `manifest`:
    the bundle's, with the rows that state has.

    Raises weights-invalid.
    """

    __slots__ = ("_counts", "_mapped", "rows")

    def __init__(self, bundle: Archive, manifest: Manifest) -> None:
        state = [row for index, row in enumerate(manifest.weights) if row.memory == STATE and index != manifest.random]
        self._mapped: Mapped | None = bundle.mapped(WEIGHTS) if any(not row.zeros for row in state) else None
        self.rows = [
            StateRow(row.offset, span(row), 0 if row.zeros or self._mapped is None else self._mapped.address(row.tensor))
            for row in state
        ]
        counts = [
            (manifest.weights[dimension.count], manifest.weights[dimension.weights[0]].shape[0])
            for dimension in manifest.state_dimensions
            if dimension.count is not None
        ]
        self._counts = (ctypes.c_int64 * len(counts))(*[number for _, number in counts])
        for place, (row, _) in enumerate(counts):
            self.rows[state.index(row)] = StateRow(row.offset, 8, ctypes.addressof(self._counts) + 8 * place)
