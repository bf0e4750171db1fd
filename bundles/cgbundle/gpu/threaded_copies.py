"""Copies of large inputs and outputs by threads through a little pinned memory. The driver copies pageable memory with one thread
at 7 to 11 GB/s; the bus has 55 (tests/gpu/REPORT.md)."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..cuda import memory
from ..cuda.driver import Context, Relaxed, call, cu
from ..cuda.libcuda import EVENT_DISABLE_TIMING, MEMORY_TYPE_HOST, POINTER_MEMORY_TYPE
from ..cuda.memory import pin, staging
from ..errors import CgbundleError

CHUNK = 2 << 20  # bytes that a thread copies at a time
THREADS = 4
"""At most one per processor. With four, 100 MB reach the GPU in 5.3 ms; the driver takes 11. Other numbers were not tried."""

TURNS = 2  # slots of a thread: it fills or reads one while the bus uses the other


class _Slot(NamedTuple):
    """Pinned memory, and an event after its last use by the bus."""

    address: int
    event: Any

    def wait(self) -> int:
        call("cuEventSynchronize", self.event)
        return self.address


class ThreadedCopies:
    """The large copies of a session, one at a time; pinned memory is copied directly. `cleanup` frees the slots, which are pinned
    at the first copy. Raises driver-failed."""

    def __init__(self, context: Context, cleanup: ExitStack) -> None:
        self._context, self._cleanup = context, cleanup
        self._slots: list[list[_Slot]] = []  # by thread

    def to_device(self, target: int, source: int, size: int, stream: Any) -> None:
        if _is_pinned(source):
            return memory.copy(target, source, size, stream, source_on_device=False)

        def send(slots: list[_Slot], places: list[tuple[int, int]]) -> None:
            for turn, (at, length) in enumerate(places):
                slot = slots[turn % TURNS]
                ctypes.memmove(slot.wait(), source + at, length)
                call("cuMemcpyHtoDAsync", target + at, slot.address, length, stream)
                call("cuEventRecord", slot.event, stream)

        self._share(size, send)

    def to_host(self, target: int, source: int, size: int, stream: Any) -> None:
        if _is_pinned(target):
            return memory.copy(target, source, size, stream, target_on_device=False)

        def fetch(slots: list[_Slot], places: list[tuple[int, int]]) -> None:
            for turn in range(len(places) + 1):
                if turn < len(places):
                    (at, length), slot = places[turn], slots[turn % TURNS]
                    call("cuMemcpyDtoHAsync", slot.address, source + at, length, stream)
                    call("cuEventRecord", slot.event, stream)
                if turn:  # while the bus brings the next chunk
                    at, length = places[turn - 1]
                    ctypes.memmove(target + at, slots[(turn - 1) % TURNS].wait(), length)

        self._share(size, fetch)

    def _share(self, size: int, copy: Callable[[list[_Slot], list[tuple[int, int]]], None]) -> None:
        """Divides a copy among threads, including this one, with their own slots. Raises the first failure after all have ended."""
        lanes = self._ready()
        failures: list[CgbundleError] = []

        def run(number: int) -> None:
            places = [(at, min(CHUNK, size - at)) for at in range(number * CHUNK, size, len(lanes) * CHUNK)]
            try:
                with self._context, Relaxed():
                    if places:
                        copy(lanes[number], places)
            except CgbundleError as failure:
                failures.append(failure)

        with ExitStack() as others:  # waits for them also after an interrupt: they use the caller's memory
            for number in range(1, len(lanes)):
                thread = threading.Thread(target=run, args=(number,), daemon=True)
                thread.start()
                others.callback(thread.join)
            run(0)
        if failures:
            raise failures[0]

    def _ready(self) -> list[list[_Slot]]:
        if not self._slots:
            number = min(THREADS, len(os.sched_getaffinity(0)))
            with ExitStack() as undo:
                room = staging(number * TURNS * CHUNK, undo, pages=True)
                pin(room, undo)
                begin, slots = ctypes.addressof(ctypes.c_char.from_buffer(room)), []
                for at in range(0, len(room), CHUNK):
                    event = call("cuEventCreate", EVENT_DISABLE_TIMING)
                    undo.callback(cu.cuEventDestroy, event)
                    undo.callback(cu.cuEventSynchronize, event)
                    slots.append(_Slot(begin + at, event))
                self._cleanup.push(undo.pop_all())
            self._slots = [slots[at : at + TURNS] for at in range(0, len(slots), TURNS)]
        return self._slots


def _is_pinned(address: int) -> bool:
    """Whether host memory is pinned, and copied at the speed of the bus."""
    error, kind = cu.cuPointerGetAttribute(POINTER_MEMORY_TYPE, address)
    return not error and kind == MEMORY_TYPE_HOST
