"""What a session puts on streams besides its programs: the order of calls, outputs, and copies between host and GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..cuda import memory
from ..cuda.driver import Context, call, check, cu
from ..cuda.libcuda import EVENT_DISABLE_TIMING
from ..cuda.memory import Output
from ..errors import CallError

if TYPE_CHECKING:
    from .threaded_copies import ThreadedCopies  # few inputs are so large

# --- the order of calls --------------------------------------------------------------------------------------------------
#
# Calls on different streams share one arena.  A captured stream must not wait for an outside event
# (CUDA_ERROR_STREAM_CAPTURE_ISOLATION), and waiting for an inside event joins the capture.  So calls inside a caller's capture,
# which the caller launches later, are not ordered.

LASTING = (0, 1)  # the legacy default stream (NULL, CU_STREAM_LEGACY), never destroyed or captured
PER_THREAD = 2  # CU_STREAM_PER_THREAD: one handle, a different stream in each thread
NONE = -1  # no stream's handle


class StreamOrder:
    """Orders the work between `begin` and `end` after the previous work, by an event. On streams that are never destroyed (ours,
    the legacy default stream) it is recorded when the stream changes, on others at every `end`. After an interrupted `end`, the
    next call waits for the whole GPU. `last`: the previous stream if it is never destroyed; calls on it need no `begin` or `end`.
    `captured`: the latest call is part of a capture. `default`: the stream of callers without one. `refusal`: why no call can be
    captured, or "". Needs the current context; `cleanup` destroys the event."""

    __slots__ = ("_default_key", "_done", "_handle", "_lasting", "_passing", "_refusal", "_unmarked", "captured", "default", "last")

    def __init__(self, stream: Any, cleanup: ExitStack, refusal: str = "") -> None:
        self._done = call("cuEventCreate", EVENT_DISABLE_TIMING)
        cleanup.callback(call, "cuEventDestroy", self._done)
        self.default, self._refusal = stream, refusal
        self._default_key = int(stream)
        self.last, self._passing, self._lasting = self._default_key, NONE, True  # `last` if it is never destroyed, else `_passing`
        self._handle = stream
        self._unmarked = False  # work has begun on a stream that may be destroyed
        self.captured = False

    def begin(self, stream: int | None) -> Any:
        """The stream's handle; later work on it runs after the previous `end`. Raises capture-refused."""
        key = self._default_key if stream is None else stream
        if key == self.last:
            return self._handle
        if key == self._passing:
            answer = cu.cuStreamIsCapturing(self._handle)
            if not answer[0] and not answer[1]:
                self.captured, self._unmarked = False, True
                return self._handle
        return self._changed(key, self.default if stream is None else stream)

    def end(self, handle: Any) -> None:
        """Marks the end of the work now if the caller's stream may be gone by the next call."""
        if not self._lasting and not self.captured:
            error = cu.cuEventRecord(self._done, handle)
            if error:
                check("cuEventRecord", error)
            self._unmarked = False

    def wait(self) -> None:
        """Waits for the work before the last `end`. Ignores errors, which other calls report."""
        if self._unmarked:
            cu.cuCtxSynchronize()
        if self._lasting:
            cu.cuEventRecord(self._done, self._handle)
        cu.cuEventSynchronize(self._done)

    def capturing(self, handle: Any) -> bool:
        lasts = int(handle) == self._default_key or int(handle) in LASTING
        return not lasts and bool(call("cuStreamIsCapturing", handle))

    def _changed(self, key: int, handle: Any) -> Any:
        lasting = key == self._default_key or key in LASTING
        if self.capturing(handle):
            if self._refusal:
                raise CallError("capture-refused", self._refusal, "call it outside the capture")
            self.captured = True
            self.last = self._passing = NONE  # the next call checks its stream
            return handle
        self.captured = False
        if self._unmarked:
            call("cuCtxSynchronize")
            self._unmarked = False
        if self._lasting:
            call("cuEventRecord", self._done, self._handle)
        call("cuStreamWaitEvent", handle, self._done, 0)
        self.last, self._passing = (key, NONE) if lasting else (NONE, NONE if key == PER_THREAD else key)
        self._handle, self._lasting, self._unmarked = handle, lasting, not lasting
        return handle


# --- outputs and copies -------------------------------------------------------------------------------------------------

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
