"""Large inputs and outputs of the host: threads copy between them and a little pinned memory, which the bus reads and writes.

The driver copies pageable memory with one thread, at 7 to 11 GB/s, where the bus takes 55 (tests/gpu/REPORT.md).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..cuda import memory
from ..cuda.driver import Context, Relaxed, check, cu
from ..cuda.libcuda import EVENT_DISABLE_TIMING, MEMORY_TYPE_HOST, POINTER_MEMORY_TYPE
from ..cuda.memory import pin, staging
from ..errors import CgbundleError

CHUNK = 2 << 20
"""Bytes that a thread copies at a time."""

THREADS = 4
"""Fewer where there are fewer processors.  100 MB reach the GPU in 5.3 ms so, in 11 by the driver; other numbers were not tried."""

TURNS = 2
"""Slots of a thread: one is copied by the thread, one by the bus."""


class _Slot(NamedTuple):
    """Pinned memory, and an event behind its last use by the bus."""

    address: int
    event: Any


class _Part(NamedTuple):
    """What one thread copies: its slots, and where its chunks begin, with their bytes."""

    slots: list[_Slot]
    chunks: list[tuple[int, int]]

    def turns(self) -> Iterator[tuple[_Slot, int, int]]:
        """Chunk after chunk with the slot whose turn it is."""
        for turn, (at, size) in enumerate(self.chunks):
            yield self.slots[turn % TURNS], at, size


class ThreadedCopies:
    """The copies of a session, whose calls make them one after the other: what is large and not pinned by threads.

    `cleanup`, with the context current, gives back the pinned memory, which is there from the first large copy on.  Raises
    driver-failed.
    """

    def __init__(self, context: Context, cleanup: ExitStack) -> None:
        self._context, self._cleanup = context, cleanup
        self._slots: list[list[_Slot]] = []

    def to_device(self, target: int, source: int, size: int, stream: Any) -> None:
        """In the order of the stream, as `memory.copy`: pageable memory has been read when this returns."""
        if _is_pinned(source):
            memory.copy(target, source, size, stream, source_on_device=False)
            return

        def send(part: _Part) -> None:
            for slot, at, length in part.turns():
                check("cuEventSynchronize", cu.cuEventSynchronize(slot.event))
                ctypes.memmove(slot.address, source + at, length)
                check("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(target + at, slot.address, length, stream))
                check("cuEventRecord", cu.cuEventRecord(slot.event, stream))

        self._share(size, send)

    def to_host(self, target: int, source: int, size: int, stream: Any) -> None:
        """In the order of the stream, as `memory.copy`: all is there when the stream has been synchronized."""
        if _is_pinned(target):
            memory.copy(target, source, size, stream, target_on_device=False)
            return

        def fetch(part: _Part) -> None:
            before: tuple[_Slot, int, int] | None = None
            for slot, at, length in part.turns():
                check("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(slot.address, source + at, length, stream))
                check("cuEventRecord", cu.cuEventRecord(slot.event, stream))
                if before is not None:
                    arrive(*before)
                before = slot, at, length
            if before is not None:
                arrive(*before)

        def arrive(slot: _Slot, at: int, length: int) -> None:
            check("cuEventSynchronize", cu.cuEventSynchronize(slot.event))
            ctypes.memmove(target + at, slot.address, length)

        self._share(size, fetch)

    def _share(self, size: int, copy: Callable[[_Part], None]) -> None:
        """Divides a copy among threads, of which this one is one.  Raises the first failure when all have ended."""
        lanes = self._ready()
        failures: list[CgbundleError] = []

        def run(number: int) -> None:
            starts = range(number * CHUNK, size, len(lanes) * CHUNK)
            try:
                with self._context, Relaxed():
                    copy(_Part(lanes[number], [(at, min(CHUNK, size - at)) for at in starts]))
            except CgbundleError as failure:
                failures.append(failure)

        with ExitStack() as others:  # which are waited for also where this thread is interrupted: they use the caller's memory
            for number in range(1, len(lanes)):
                thread = threading.Thread(target=run, args=(number,), daemon=True)
                thread.start()
                others.callback(thread.join)
            run(0)
        if failures:
            raise failures[0]

    def _ready(self) -> list[list[_Slot]]:
        """The slots of each thread."""
        if not self._slots:
            number = min(THREADS, len(os.sched_getaffinity(0)))
            with ExitStack() as undo:
                room = staging(number * TURNS * CHUNK, undo, pages=True)
                pin(room, undo)
                begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
                slots = [_slot(begin + at, undo) for at in range(0, len(room), CHUNK)]
                self._cleanup.push(undo.pop_all())
            self._slots = [slots[at : at + TURNS] for at in range(0, len(slots), TURNS)]
        return self._slots


def _slot(address: int, cleanup: ExitStack) -> _Slot:
    event = check("cuEventCreate", cu.cuEventCreate(EVENT_DISABLE_TIMING))
    cleanup.callback(cu.cuEventDestroy, event)
    cleanup.callback(cu.cuEventSynchronize, event)
    return _Slot(address, event)


def _is_pinned(address: int) -> bool:
    """Whether the driver knows host memory as pinned, and copies it as fast as the bus."""
    error, kind = cu.cuPointerGetAttribute(POINTER_MEMORY_TYPE, address)
    return not error and kind == MEMORY_TYPE_HOST
