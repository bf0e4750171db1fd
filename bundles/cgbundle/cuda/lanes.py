"""Uploads weights that glibc's threads read (POSIX asynchronous I/O, aio(7)). glibc reads sequentially per descriptor, several in
parallel: a lane has one. Its threads never wait for the interpreter's lock: on the host of an H100 they read 16 GB in the page
cache at 45 GB/s, twelve Python threads at 33 (tests/gpu/REPORT.md)."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

from ..errors import BundleError
from ..format.file_names import WEIGHTS
from .driver import call, cu
from .memory import HUGE, Piece, Slot, new_slot, pin, place, staging

MOST = 20  # glibc's default number of threads per process
PATIENCE = 100_000_000  # longest wait in nanoseconds
NO_SIGNAL = 1  # SIGEV_NONE


class _Block(ctypes.Structure):
    """`struct aiocb` of glibc with 64-bit pointers (sysdeps/gnu/bits/aio_types.h)."""

    _fields_ = [
        ("file", ctypes.c_int), ("operation", ctypes.c_int), ("priority", ctypes.c_int), ("address", ctypes.c_void_p),
        ("size", ctypes.c_size_t), ("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48), ("own", ctypes.c_char * 32), ("offset", ctypes.c_int64), ("reserved", ctypes.c_char * 32),
    ]  # fmt: skip


class _Functions(NamedTuple):
    read: Callable[[int], int]
    error: Callable[[int], int]
    result: Callable[[int], int]
    suspend: Callable[[Any, int, Any], int]
    cancel: Callable[[int, int | None], int]


@cache
def _functions() -> _Functions | None:
    """glibc's functions; None without it, or in old versions."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
        quick, slow = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        read, error, result = quick.aio_read64, quick.aio_error64, quick.aio_return64
        suspend, cancel = slow.aio_suspend64, slow.aio_cancel64
    except (AttributeError, OSError, ValueError):
        return None
    for function in (read, error, result):
        function.argtypes = [ctypes.c_void_p]
    result.restype = ctypes.c_ssize_t
    suspend.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    cancel.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return _Functions(read, error, result, suspend, cancel)


def available() -> bool:
    return _functions() is not None


class AsyncReads:
    """Reads of an open file (`name` for errors) by `lanes` threads. Target memory must stay valid until `close`. Not
    thread-safe."""

    def __init__(self, file: int, lanes: int, name: str = WEIGHTS) -> None:
        functions = _functions()
        if functions is None:
            raise RuntimeError("no asynchronous reads here")  # callers ask `available` first
        self._call, self._name = functions, name
        self._files = [os.dup(file) for _ in range(min(lanes, MOST))]
        self._queues: list[deque[_Block]] = [deque() for _ in self._files]

    @property
    def lanes(self) -> int:
        return len(self._files)

    def begin(self, lane: int, address: int, offset: int, size: int) -> None:
        """Queues a read of `size` bytes at `offset`. Raises OSError."""
        block = _Block(file=self._files[lane], address=address, size=size, notify=NO_SIGNAL, offset=offset)
        if self._call.read(ctypes.addressof(block)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._queues[lane].append(block)

    def take(self, lane: int) -> bool:
        """Removes the lane's first read if it is complete. Raises OSError, and weights-invalid at the end of the file."""
        queue = self._queues[lane]
        error = self._call.error(ctypes.addressof(queue[0])) if queue else errno.EINPROGRESS
        if error == errno.EINPROGRESS:
            return False
        block = queue.popleft()
        count = self._call.result(ctypes.addressof(block))
        if error:
            raise OSError(error, os.strerror(error))
        if count != block.size:
            raise BundleError("weights-invalid", f"{self._name}: the file ends too early")
        return True

    def wait(self) -> None:
        """Returns when a read is complete, or after a tenth of a second."""
        first = [ctypes.addressof(queue[0]) for queue in self._queues if queue]
        if first:
            limit = (ctypes.c_long * 2)(0, PATIENCE)  # struct timespec
            self._call.suspend((ctypes.c_void_p * len(first))(*first), len(first), limit)

    def close(self) -> None:
        """Cancels and waits for all reads; may be called twice."""
        for file in self._files:
            self._call.cancel(file, None)
        for queue in self._queues:
            while queue:
                while self._call.error(ctypes.addressof(queue[0])) == errno.EINPROGRESS:
                    self.wait()
                self._call.result(ctypes.addressof(queue[0]))
                queue.popleft()
        while self._files:
            os.close(self._files.pop())


Reading = tuple[Slot, Sequence[Piece]]
"""A lane's slot that is being read into, and its pieces; its other slot is being sent. On an H200's host twelve lanes of 4 MB sent
45 to 47 GB/s. Three slots of 2 MB: 42 to 45, because this thread does twice as much (a C program: 51)."""


def send_by_lanes(
    reads: AsyncReads, groups: Sequence[Sequence[Piece]], chunk: int, send: Callable[[Slot, Sequence[Piece]], None],
    cleanup: ExitStack,
) -> Iterator[None]:  # fmt: skip
    """Reads every group, of at most `chunk` bytes, and passes it to `send`; yields after each. The second slots are pinned while
    the first are read into. `cleanup` waits until all has been sent. Raises as `reads` does, driver-failed."""
    lanes, waiting, query = range(reads.lanes), iter(groups), cu.held("cuStreamQuery")
    width = -(-chunk * reads.lanes // HUGE) * HUGE  # the two parts are pinned separately, and must not share a page
    memory = staging(width * 2, cleanup, pages=True)
    cleanup.callback(reads.close)  # before the memory is freed

    def pinned(row: int) -> list[Slot]:
        half = memory[row * width :][:width]
        pin(half, cleanup)
        return [new_slot(half[lane * chunk :][:chunk], cleanup) for lane in lanes]

    def begin(lane: int, slot: Slot) -> Reading | None:
        if (group := next(waiting, None)) is None:
            return None
        reads.begin(lane, slot.address, *place(group))
        return slot, group

    reading = [begin(lane, slot) for lane, slot in enumerate(pinned(0))]
    others = pinned(1)
    while any(reading):
        sent = False
        for lane in lanes:
            if (read := reading[lane]) is None or not reads.take(lane):
                continue
            send(*read)
            free, others[lane] = others[lane], read[0]
            if query(free.stream):
                call("cuStreamSynchronize", free.stream, detail="weights")
            reading[lane], sent = begin(lane, free), True
            yield
        if not sent:
            reads.wait()
