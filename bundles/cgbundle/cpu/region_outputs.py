"""The outputs of a replay on the CPU, as tensors of the code's own that are freed with their last holder."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_void_p

from . import libtorch
from .output_layouts import OutputLayouts


class RegionOutputs:
    """The output tensors of one replay, in memory of torch's allocator until the last reference to this goes, or to what `own`
    gives."""

    __slots__ = ("_handles", "_torch", "addresses")

    device: int | None = None
    static = False

    def __init__(self, torch: libtorch.LibTorch, handles: Array[c_void_p], layouts: OutputLayouts, given: Sequence[int]) -> None:
        self._torch, self._handles = torch, handles
        self.addresses = layouts.addresses(handles, given)

    def own(self, index: int) -> OwnOutput:
        """The tensor, which is no longer kept here."""
        handle, self._handles[index] = self._handles[index], None
        return OwnOutput(self._torch, handle)

    def __del__(self) -> None:
        for handle in self._handles:
            if handle is not None:
                self._torch.delete(handle)


class OwnOutput:
    """One output tensor, in memory of torch's allocator until the last reference to this goes."""

    __slots__ = ("_handle", "_torch")

    def __init__(self, torch: libtorch.LibTorch, handle: int | None) -> None:
        self._torch, self._handle = torch, handle

    def __del__(self) -> None:
        self._torch.delete(self._handle)
