"""The outputs of a replay on the CPU, as tensors of the code's own that are freed with their last holder."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from ctypes import Array, c_void_p
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

from ..format.open_files import make_calls, when_gone
from .libtorch import LibTorch


@lru_cache(maxsize=256)
def handles_type(count: int) -> type[Array[c_void_p]]:
    """The array of so many handles of tensors."""
    return c_void_p * count


ALL: Any = itemgetter(slice(None))
"""The elements of an array, as a list: an array of ctypes' is slow to go through."""


class RegionOutputs:
    """The `count` output tensors of one replay, in memory of torch's allocator until `release`, or until the last reference to this
    goes.

    The replay puts their handles into `handles`, which are 0 before: it may be interrupted at any point, and each tensor is freed
    once, by functions of C.  To be made takes microseconds: `free` has those that were released, for the next replays.
    """

    __slots__ = ("__weakref__", "_free", "_left", "_torch", "addresses", "handles")

    device: int | None = None
    static = False

    def __init__(self, torch: LibTorch, count: int, free: deque[RegionOutputs] | None = None) -> None:
        self._torch, self._free, self.handles = torch, free, handles_type(count)()
        self._left: list[int | None] = []  # handles to be freed, on top of a 0
        self.addresses: Sequence[int] = ()
        rest = chain.from_iterable(map(ALL, (self.handles, self._left)))
        when_gone(self, map(torch.delete, filter(None, rest)))

    def own(self, index: int) -> RegionOutputs:
        """The tensor, which is no longer kept here."""
        made = RegionOutputs(self._torch, 1)
        made.handles[0], self.handles[index] = self.handles[index], None
        return made

    def release(self) -> None:
        """Frees the tensors; nobody uses them any more."""
        left, handles = self._left, self.handles
        left[:], handles[:] = [0, *handles[:]], [None] * len(handles)  # at once: nothing is called
        make_calls(map(self._torch.delete, filter(None, iter(left.pop, 0))))
        if self._free is not None:
            self._free.append(self)
