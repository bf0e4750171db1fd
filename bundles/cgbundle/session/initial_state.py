"""What state holds before the first call, and after `reset`: contents from weights.safetensors, which stays mapped for it."""

from __future__ import annotations

from typing import NamedTuple

from ..format.archive import WEIGHTS, Archive
from ..format.spans import span
from ..validate.state import STATE

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
        for index, weight in enumerate(manifest.weights):
            if weight.memory == STATE and index != manifest.random:
                if not self.rows:
                    self._mapped = bundle.mapped(WEIGHTS)
                source = 0 if _is_zero(self._mapped.data(weight.tensor)) else self._mapped.address(weight.tensor)
                self.rows.append(StateRow(weight.offset, span(weight), source))


def _is_zero(data: memoryview) -> bool:
    zeros = bytes(CHUNK)
    for begin in range(0, len(data), CHUNK):
        part = bytes(data[begin : begin + CHUNK])
        if part != zeros[: len(part)]:
            return False
    return True
