"""Reads by threads of the C library (POSIX asynchronous I/O as glibc has it, aio(7)), and weights that are uploaded from them.

glibc reads what is asked of one descriptor in order, in a thread of its own, and of several descriptors side by side: a lane for
each.  These threads never wait for the interpreter's lock, as Python's do between two reads: of 16 GB in the page cache twelve of
Python's read 33 GB/s on the host of an H100, and glibc's 45 (tests/gpu/REPORT.md).
"""

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

from ..cuda.driver import call, cu
from ..cuda.memory import HUGE, Slot, new_slot, pin, staging
from ..errors import BundleError
from ..format.file_names import WEIGHTS
from .reads import Piece, place

MOST = 20
"""Threads that glibc has for all of a process, if nobody asks for more."""

PATIENCE = 100_000_000
"""Nanoseconds after which a wait looks whether there is still something to wait for."""

NO_SIGNAL = 1
"""SIGEV_NONE."""


class _Block(ctypes.Structure):
    """`struct aiocb` of glibc where pointers have 64 bits (sysdeps/gnu/bits/aio_types.h); private fields by their place alone."""

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
    """None where the C library is not glibc, or an old one that keeps them elsewhere."""
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
    """Whether this process can read so."""
    return _functions() is not None


class AsyncReads:
    """Reads of the open file `file`, the caller's, which errors call `name`, in as many threads as there are `lanes`.

    What is read into has to stay where it is until `close`.  One thread may use it.
    """

    def __init__(self, file: int, lanes: int, name: str = WEIGHTS) -> None:
        functions = _functions()
        if functions is None:
            raise RuntimeError("no asynchronous reads here")  # `available` says so
        self._call, self._name = functions, name
        self._files = [os.dup(file) for _ in range(min(lanes, MOST))]
        self._asked: list[deque[_Block]] = [deque() for _ in self._files]

    @property
    def lanes(self) -> int:
        return len(self._files)

    def begin(self, lane: int, address: int, offset: int, size: int) -> None:
        """Asks a lane for `size` bytes at `offset` of the file, behind what it was asked for before.  Raises OSError."""
        block = _Block(file=self._files[lane], address=address, size=size, notify=NO_SIGNAL, offset=offset)
        if self._call.read(ctypes.addressof(block)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._asked[lane].append(block)

    def take(self, lane: int) -> bool:
        """Whether what the lane was asked for first is there; it is forgotten then.  Raises OSError, and weights-invalid where the
        file ends too early."""
        asked = self._asked[lane]
        if not asked:
            return False
        address = ctypes.addressof(asked[0])
        error = self._call.error(address)
        if error == errno.EINPROGRESS:
            return False
        count, size = self._call.result(address), asked.popleft().size
        if error:
            raise OSError(error, os.strerror(error))
        if count != size:
            raise BundleError("weights-invalid", f"{self._name}: the file ends too early")
        return True

    def wait(self) -> None:
        """Returns when something can be taken, or after a tenth of a second."""
        first = [ctypes.addressof(asked[0]) for asked in self._asked if asked]
        if first:
            limit = (ctypes.c_long * 2)(0, PATIENCE)  # struct timespec
            self._call.suspend((ctypes.c_void_p * len(first))(*first), len(first), limit)

    def close(self) -> None:
        """Returns when nothing is read any more; may be called twice."""
        for file in self._files:
            self._call.cancel(file, None)
        for asked in self._asked:
            while asked:
                address = ctypes.addressof(asked[0])
                while self._call.error(address) == errno.EINPROGRESS:
                    self.wait()
                self._call.result(address)
                asked.popleft()
        for file in self._files:
            os.close(file)
        self._files = []


Reading = tuple[Slot, Sequence[Piece]]
"""What a lane reads, and into which of its two slots: the other one travels.  On an H200's host twelve lanes of 4 MB sent 45 to 47
GB/s; with three slots of 2 MB, two of them asked for, 42 to 45, since this thread has twice as much to do (a C program: 51)."""


def send_by_lanes(
    reads: AsyncReads,
    groups: Sequence[Sequence[Piece]],
    chunk: int,
    send: Callable[[Slot, Sequence[Piece]], None],
    cleanup: ExitStack,
) -> Iterator[None]:
    """Reads every group, of at most `chunk` bytes, and hands it to `send`; yields behind each.  The first slots are read into while
    the others are pinned.  At the end all has been sent, and `cleanup` waits until it is there.  Raises as `reads` does,
    driver-failed."""
    lanes, left, query = range(reads.lanes), iter(groups), cu.held("cuStreamQuery")
    width = -(-chunk * reads.lanes // HUGE) * HUGE  # what is pinned at a time shares no page with the next
    memory = staging(width * 2, cleanup, pages=True)
    cleanup.callback(reads.close)  # before the memory goes

    def pinned(row: int) -> list[Slot]:
        half = memory[row * width :][:width]
        pin(half, cleanup)
        return [new_slot(half[lane * chunk :][:chunk], cleanup) for lane in lanes]

    def ask(lane: int, into: Slot) -> Reading | None:
        if (group := next(left, None)) is None:
            return None
        reads.begin(lane, into.address, *place(group))
        return into, group

    reading = [ask(lane, slot) for lane, slot in enumerate(pinned(0))]
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
            reading[lane], sent = ask(lane, free), True
            yield
        if not sent:
            reads.wait()
