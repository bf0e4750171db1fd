"""The outputs of a replay on the CPU, as tensors of the code's own that are freed with their last holder."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_void_p
from functools import lru_cache

from ..format.open_files import when_gone
from .libtorch import LibTorch


@lru_cache(maxsize=256)
def handles_type(count: int) -> type[Array[c_void_p]]:
    """The array of so many handles of tensors."""
    return c_void_p * count


class RegionOutputs:
    """The `count` output tensors of one replay, in memory of torch's allocator until the last reference to this goes.

    The replay puts their handles into `handles`, which are 0 before: it may be interrupted at any point."""

    __slots__ = ("__weakref__", "_torch", "addresses", "handles")

    device: int | None = None
    static = False

    def __init__(self, torch: LibTorch, count: int) -> None:
        self._torch, self.handles = torch, handles_type(count)()
        self.addresses: Sequence[int] = ()
        when_gone(self, map(torch.delete, filter(None, self.handles)))

    def own(self, index: int) -> RegionOutputs:
        """The tensor, which is no longer kept here."""
        made = RegionOutputs(self._torch, 1)
        made.handles[0], self.handles[index] = self.handles[index], None
        return made
