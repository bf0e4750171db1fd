"""Outputs of a replay on a GPU, and copies between host and GPU."""

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
"""Bytes from which threads copy: 13 MB were not faster than by the driver, 100 MB twice as fast."""


class DeviceOutputs:
    """Outputs in the program's GPU memory, at fixed addresses."""

    static = True

    def __init__(self, addresses: Sequence[int], device: int | None, copy_out: Callable[[int, int, int], Output]) -> None:
        self.addresses, self.device, self.copy_out = addresses, device, copy_out

    def transfer_ownership(self, index: int) -> None:
        """None: the next replay writes there."""

    def release(self) -> None: ...


class HostOutputs:
    """Outputs copied to CPU memory that lives as long as this object; large ones in huge pages, allocated on first use."""

    device: int | None = None
    static = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [_room(size) for size in sizes]
        self.addresses: Sequence[int] = [ctypes.addressof(room) for room in self._memory]

    def transfer_ownership(self, index: int) -> object:
        return self._memory[index]

    def release(self) -> None: ...


def _room(size: int) -> ctypes.Array[ctypes.c_char]:
    room = ctypes.c_char * max(1, size)
    return room() if size < LARGE else room.from_buffer(memory.huge_pages(size))


class HostCopies:
    """Copies between host and GPU, large ones by threads. Raises driver-failed."""

    __slots__ = ("_cleanup", "_context", "_threaded")

    def __init__(self, context: Context, cleanup: ExitStack) -> None:
        """`cleanup` frees what large copies pin."""
        self._context, self._cleanup = context, cleanup
        self._threaded: ThreadedCopies | None = None

    def to_device(self, target: int, source: int, size: int, stream: Any) -> None:
        """In stream order, as `memory.copy`: pageable memory has been read on return."""
        if size < LARGE:
            memory.copy(target, source, size, stream, source_on_device=False)
        else:
            self._large().to_device(target, source, size, stream)

    def to_host(self, target: int, source: int, size: int, stream: Any) -> None:
        """In stream order, as `memory.copy`: complete after the stream is synchronized."""
        if size < LARGE:
            memory.copy(target, source, size, stream, target_on_device=False)
        else:
            self._large().to_host(target, source, size, stream)

    def _large(self) -> ThreadedCopies:
        if self._threaded is None:
            from .threaded_copies import ThreadedCopies

            self._threaded = ThreadedCopies(self._context, self._cleanup)
        return self._threaded
