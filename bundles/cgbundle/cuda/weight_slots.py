"""Slots of staging memory, which weights pass through on their way to the GPU."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple

from .driver import check, cu
from .libcuda import STREAM_NON_BLOCKING

HUGE = 2 << 20
"""Bytes of a huge page."""


class Slot(NamedTuple):
    """A part of the staging memory, its address, and the stream that alone reads it: to wait for the stream is to wait for the
    slot."""

    view: memoryview
    address: int
    stream: Any


def staging(size: int, cleanup: ExitStack, *, pages: bool) -> memoryview:
    """Memory for slots, from a huge page on; with `pages` in huge pages, where the system has them.  `cleanup` keeps it."""
    memory = huge_pages(size + HUGE) if pages else _pages(size + HUGE)
    begin = -_address(memoryview(memory)) % HUGE
    cleanup.callback(_keep, memory)
    return memoryview(memory)[begin : begin + size]


def huge_pages(size: int) -> mmap:
    """Memory that the system gives when it is first used, in huge pages where it has them."""
    memory = _pages(size)
    with suppress(OSError):  # a system that knows none
        memory.madvise(MADV_HUGEPAGE)
    return memory


def _pages(size: int) -> mmap:
    return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)


def pin(memory: memoryview, cleanup: ExitStack) -> None:
    """What cannot be pinned works as it is, only slower."""
    if not cu.cuMemHostRegister(address := _address(memory), len(memory), 0):
        cleanup.callback(cu.cuMemHostUnregister, address)


def new_slot(view: memoryview, cleanup: ExitStack) -> Slot:
    """With a stream, which `cleanup` waits for before the memory goes, also when a read failed."""
    stream = check("cuStreamCreate", cu.cuStreamCreate(STREAM_NON_BLOCKING))
    cleanup.callback(cu.cuStreamDestroy, stream)
    cleanup.callback(cu.cuStreamSynchronize, stream)
    return Slot(view, _address(view), stream)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _keep(memory: mmap) -> None:
    """Until here it is needed."""
