"""Allocations for a session's memories and outputs on the GPU, and a pinned host buffer. The build planned all offsets."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple

from ..errors import CgbundleError, OutOfMemory
from ..format.schema import MEMORIES, STATE
from .driver import Context, call, check, cu, free_bytes
from .libcuda import STREAM_NON_BLOCKING

SMALLEST = 256  # bytes allocated for an empty memory, whose address may be a kernel's argument
FILLED = (STATE, "inputs")
"""Memories that start as zeros: `state` by definition, `inputs` so that padding never has another process's data."""

WEIGHTS, PEER = "weights", "peer"  # shared by all sessions, shared by all ranks
HOST = "host"  # the pinned host memory for values that cross between host and graph steps


class Memories:
    """A session's memories on the current context's GPU. `bases`: addresses in the order of MEMORIES, 0 for missing ones and for
    memory `host`, whose address is `host`. `lent`: addresses of weights and peer, which belong to others. `cleanup` frees the rest.
    Raises OutOfMemory with the needed bytes (of GPU memory also the free ones)."""

    __slots__ = ("bases", "host", "sizes")

    def __init__(self, sizes: Mapping[str, int], lent: Mapping[str, int], cleanup: ExitStack, stream: Any) -> None:
        self.sizes = dict(sizes)
        bases = []
        for name in MEMORIES:
            if name not in sizes or name == HOST:
                bases.append(lent.get(name, 0))
                continue
            size = max(sizes[name], SMALLEST)
            base = allocate(size, f"memory {name}")
            cleanup.callback(call, "cuMemFree", base)
            if name in FILLED:
                fill(base, size, 0, stream)
            bases.append(base)
        self.bases = tuple(bases)
        self.host = 0
        if HOST in sizes:
            self.host = allocate_pinned(max(sizes[HOST], SMALLEST), f"memory {HOST}")
            cleanup.callback(call, "cuMemFreeHost", self.host)

    def address(self, memory: str, offset: int) -> int:
        return (self.host if memory == HOST else self.bases[MEMORIES.index(memory)]) + offset

    def range(self, memory: str) -> tuple[int, int]:
        begin = self.bases[MEMORIES.index(memory)]
        return begin, begin + self.sizes.get(memory, 0)

    def poison(self, byte: int, stream: Any, spared: Sequence[tuple[int, int]] = ()) -> None:
        """Fills the arena and memory `host` with `byte`, in stream order, except the (begin, end) ranges `spared` of the arena."""
        begin = 0
        for start, end in (*sorted(spared), (self.sizes.get("arena", 0),) * 2):
            fill(self.address("arena", begin), max(0, start - begin), byte, stream)
            begin = end
        if self.host:
            call("cuStreamSynchronize", stream)  # copies of the last replay may still read there
            ctypes.memset(self.host, byte, self.sizes[HOST])


def allocate(size: int, what: str) -> int:
    try:
        return int(call("cuMemAlloc", size, detail=what))
    except OutOfMemory:
        raise OutOfMemory("out-of-memory", f"{what}: needs {size:,} bytes, the GPU has {free_bytes():,} free") from None


def allocate_pinned(size: int, what: str) -> int:
    """Pinned host memory. Raises OutOfMemory with `what`."""
    try:
        return int(call("cuMemHostAlloc", size, 0, detail=what))
    except OutOfMemory:
        reason = f"{what}: needs {size:,} bytes of pinned memory, which the system does not give"
        raise OutOfMemory("out-of-memory", reason) from None


def fill(address: int, size: int, byte: int, stream: Any) -> None:
    if size:
        check("cuMemsetD8Async", cu.cuMemsetD8Async(address, byte, size, stream))


def copy(target: int, source: int, size: int, stream: Any, *, target_on_device: bool = True, source_on_device: bool = True) -> None:
    """Copies in stream order. Pageable sources have been read on return. Host targets are complete after the stream is
    synchronized; pinned memory must not change until then."""
    if not size:
        return
    if target_on_device and source_on_device:
        check("cuMemcpyDtoDAsync", cu.cuMemcpyDtoDAsync(target, source, size, stream))
    elif target_on_device:
        check("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(target, source, size, stream))
    elif source_on_device:
        check("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(target, source, size, stream))
    else:
        raise ValueError("expected source or target on the GPU")


class Output:
    """GPU memory from the driver's pool for one output, which outlives the program. `free`, or the end of this object, returns it
    in the order of its stream, which must still exist. The constructor needs `context` to be current."""

    __slots__ = ("_context", "_stream", "address", "bytes")

    def __init__(self, context: Context, size: int, stream: Any) -> None:
        self._context: Context | None = None
        self._stream, self.bytes = stream, size
        try:
            self.address = int(call("cuMemAllocAsync", max(size, 1), stream))
        except OutOfMemory:
            raise OutOfMemory("out-of-memory", f"output: needs {size:,} bytes, the GPU has {free_bytes():,} free") from None
        context.retain()
        self._context = context

    def free(self) -> None:
        context, self._context = self._context, None
        if context is None or context.inherited:
            return
        try:
            with context:
                call("cuMemFreeAsync", self.address, self._stream)
        finally:
            context.release()

    # At interpreter exit, module globals are None; the driver frees the memory of the process.
    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return
        with suppress(CgbundleError):  # after a kernel fault, which another call has reported
            self.free()


# --- staging memory: pinned memory of the host that copies pass through ---------------------------------------------

HUGE = 2 << 20  # bytes of a huge page


class Slot(NamedTuple):
    """A part of the staging memory, and the only stream that reads it."""

    view: memoryview
    address: int
    stream: Any


class Piece(NamedTuple):
    """`size` bytes at `begin` of a file, for `target` of memory weights."""

    begin: int
    size: int
    target: int


def place(group: Sequence[Piece]) -> tuple[int, int]:
    """A group's offset in the file, and its bytes from first to last."""
    return group[0].begin, group[-1].begin + group[-1].size - group[0].begin


def staging(size: int, cleanup: ExitStack, *, pages: bool) -> memoryview:
    """Memory for slots, aligned to a huge page; `pages`: in huge pages if possible. `cleanup` keeps it alive."""
    memory = huge_pages(size + HUGE) if pages else mmap(-1, size + HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    begin = -_host_address(memoryview(memory)) % HUGE
    cleanup.callback(lambda memory: None, memory)
    return memoryview(memory)[begin : begin + size]


def huge_pages(size: int) -> mmap:
    """Memory that is allocated on first use, in huge pages if possible."""
    memory = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(MADV_HUGEPAGE)
    return memory


def pin(memory: memoryview, cleanup: ExitStack) -> None:
    """Pins memory. If that fails, copies are slower."""
    if not cu.cuMemHostRegister(address := _host_address(memory), len(memory), 0):
        cleanup.callback(cu.cuMemHostUnregister, address)


def new_slot(view: memoryview, cleanup: ExitStack) -> Slot:
    """`cleanup` waits for its stream before the memory is freed."""
    stream = call("cuStreamCreate", STREAM_NON_BLOCKING)
    cleanup.callback(cu.cuStreamDestroy, stream)
    cleanup.callback(cu.cuStreamSynchronize, stream)
    return Slot(view, _host_address(view), stream)


def _host_address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
