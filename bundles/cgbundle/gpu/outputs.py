"""Outputs of a replay on a GPU, and copies between the host and the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..cuda import memory
from ..cuda.driver import Context
from ..cuda.memory import Output

if TYPE_CHECKING:
    from .threaded_copies import ThreadedCopies  # few inputs are so large

LARGE = 16 << 20
"""Bytes from which on threads copy from and to the host: of 13 MB they were no faster than the driver, of 100 MB twice as fast."""


class DeviceOutputs:
    """Outputs in the program's own GPU memory, the same after every replay; it owns the tensors over them."""

    static = True

    def __init__(self, addresses: Sequence[int], device: int | None, copy_out: Callable[[int, int, int], Output]) -> None:
        self.addresses, self.device, self.copy_out = addresses, device, copy_out

    def transfer_ownership(self, index: int) -> None:
        """None: the next replay writes there."""

    def release(self) -> None:
        """Nothing: they stay."""


class HostOutputs:
    """Outputs copied to memory of the CPU that lives as long as this object; of much of it huge pages, each made when it is first
    written to, by whichever thread that is."""

    device: int | None = None
    static = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [_room(size) for size in sizes]
        self.addresses: Sequence[int] = [ctypes.addressof(room) for room in self._memory]

    def transfer_ownership(self, index: int) -> object:
        """Each has memory of its own."""
        return self._memory[index]

    def release(self) -> None:
        """Nothing: the memory goes with this object."""


def _room(size: int) -> ctypes.Array[ctypes.c_char]:
    room = ctypes.c_char * max(1, size)
    return room() if size < LARGE else room.from_buffer(memory.huge_pages(size))


class HostCopies:
    """Copies between the host and the GPU; large ones by threads.  Raises driver-failed."""

    __slots__ = ("_cleanup", "_context", "_threaded")

    def __init__(self, context: Context, cleanup: ExitStack) -> None:
        """`cleanup` gives back what large copies pin."""
        self._context, self._cleanup = context, cleanup
        self._threaded: ThreadedCopies | None = None

    def to_device(self, target: int, source: int, size: int, stream: Any) -> None:
        """In the order of the stream, as `memory.copy`: pageable memory has been read when this returns."""
        if size < LARGE:
            memory.copy(target, source, size, stream, source_on_device=False)
        else:
            self._large().to_device(target, source, size, stream)

    def to_host(self, target: int, source: int, size: int, stream: Any) -> None:
        """In the order of the stream, as `memory.copy`: all is there when the stream has been synchronized."""
        if size < LARGE:
            memory.copy(target, source, size, stream, target_on_device=False)
        else:
            self._large().to_host(target, source, size, stream)

    def _large(self) -> ThreadedCopies:
        if self._threaded is None:
            from .threaded_copies import ThreadedCopies

            self._threaded = ThreadedCopies(self._context, self._cleanup)
        return self._threaded
