"""Where the weights lie in this process: in the mapped file, or where an update has put them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..format.safetensors import Mapped
from ..format.schema import Weight

if TYPE_CHECKING:
    from ..session.weight_contents import Contents

ALIGNMENT = 64
"""Bytes: a cache line, and what AOTInductor gives a constant (AOTI_CONST_ALIGNMENT)."""


class Weights:
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

    def updated(self, rows: Sequence[Weight], contents: Sequence[Contents]) -> Weights:
        """The weights with other contents for some, copied to memory of our own; those that lie on a GPU are fetched."""
        sizes = [-(-each.bytes // ALIGNMENT) * ALIGNMENT for each in contents]
        memory = anonymous(sum(sizes))
        place, moved = ctypes.addressof(memory), dict(self._moved)
        for row, each, size in zip(rows, contents, sizes, strict=True):
            each.near().copy_to(place, row)
            moved[row.tensor] = (place, memory)
            place += size
        return Weights(self._mapped, moved)


def anonymous(size: int) -> Any:
    """Zeros in memory of no file, which the system gives when they are first used, at the start of a page."""
    return (ctypes.c_char * max(1, size)).from_buffer(mmap.mmap(-1, max(1, size)))
