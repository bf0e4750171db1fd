"""What state holds before the first call, and after `reset`: contents from weights.safetensors, which stays mapped for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..format.archive import Archive
from ..format.file_names import WEIGHTS
from ..format.spans import span
from ..validate.state import STATE

if TYPE_CHECKING:
    from ..format.safetensors import Mapped

CHUNK = 1 << 20
"""Bytes compared with zeros at a time."""


class StateRow(NamedTuple):
    """`size` bytes at `offset` of memory state; `source` is where their initial contents lie in this process, 0 for zeros."""

    offset: int
    size: int
    source: int


class InitialState:
    """The initial contents of a bundle's state but that of the random numbers: `rows`, valid while this object lives.

    Large state is mostly zeros (a cache to be filled), which are found once and not read again.  Raises weights-invalid.
    """

    __slots__ = ("_mapped", "rows")

    def __init__(self, bundle: Archive) -> None:
        manifest = bundle.manifest
        self.rows: list[StateRow] = []
        self._mapped: Mapped | None = None
        for index, weight in enumerate(manifest.weights):
            if weight.memory == STATE and index != manifest.random:
                source = 0 if weight.zeros else self._stored(bundle, weight.tensor)
                self.rows.append(StateRow(weight.offset, span(weight), source))

    def _stored(self, bundle: Archive, tensor: str) -> int:
        """Where a tensor of the file lies; 0 for zeros, which the bundles of before have there, too."""
        if self._mapped is None:
            self._mapped = bundle.mapped(WEIGHTS)
        return 0 if _is_zero(self._mapped.data(tensor)) else self._mapped.address(tensor)


def _is_zero(data: memoryview) -> bool:
    zeros = bytes(CHUNK)
    for begin in range(0, len(data), CHUNK):
        part = bytes(data[begin : begin + CHUNK])
        if part != zeros[: len(part)]:
            return False
    return True
