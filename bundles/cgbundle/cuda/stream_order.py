"""The order of calls that share one arena but come on different streams, and calls that join a caller's stream capture.

A stream that is being captured must not wait for an event of outside (CUDA_ERROR_STREAM_CAPTURE_ISOLATION), and whoever waits for
one of inside joins the capture.  So calls inside, which the caller launches later, take no part in the order at all.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..errors import CallError
from .driver import call, check, cu
from .libcuda import EVENT_DISABLE_TIMING

LASTING = (0, 1)
"""Handles of the legacy default stream, which no one can destroy, nor capture: NULL and CU_STREAM_LEGACY."""

PER_THREAD = 2
"""CU_STREAM_PER_THREAD: one handle, and another stream in every thread."""

NONE = -1
"""No stream's handle."""


class StreamOrder:
    """Puts the work of every `begin` ... `end` behind that of the one before, whatever their streams.

    The end of the work is marked when another stream comes, if the last one is sure to exist then; else at every `end`.  Sure are
    ours and the legacy default stream, which is torch's.  Where an interrupt left an `end` out, the whole GPU is waited for.
    `last` is the stream of the call before, where that lasts: whoever comes on it again needs neither `begin` nor `end`.
    `captured`: the call that was begun last is part of a caller's capture.  `default` is the stream of callers who name none.
    `refusal` says why no call can be captured, "" where it can.  The context must be current; `cleanup` gives the event back.
    """

    __slots__ = ("_default_key", "_done", "_handle", "_lasting", "_passing", "_refusal", "_unmarked", "captured", "default", "last")

    def __init__(self, stream: Any, cleanup: ExitStack, refusal: str = "") -> None:
        self._done = call("cuEventCreate", EVENT_DISABLE_TIMING)
        cleanup.callback(call, "cuEventDestroy", self._done)
        self.default, self._refusal = stream, refusal
        self._default_key = int(stream)
        self.last, self._passing, self._lasting = self._default_key, NONE, True  # a stream that lasts, or may go; one of them
        self._handle = stream
        self._unmarked = False  # work of a stream that may go has begun
        self.captured = False

    def begin(self, stream: int | None) -> Any:
        """The stream's handle; what is enqueued on it now runs after the work before the last `end`.  Raises capture-refused."""
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
        """Marks the end of the work.  A caller's stream is marked now, because it may be gone by the next call."""
        if not self._lasting and not self.captured:
            error = cu.cuEventRecord(self._done, handle)
            if error:
                check("cuEventRecord", error)
            self._unmarked = False

    def wait(self) -> None:
        """Waits for the work before the last `end`, as far as the driver still can: what went wrong was reported or shows later."""
        if self._unmarked:
            cu.cuCtxSynchronize()
        if self._lasting:
            cu.cuEventRecord(self._done, self._handle)
        cu.cuEventSynchronize(self._done)

    def capturing(self, handle: Any) -> bool:
        """Whether the stream of a call is being captured."""
        lasts = int(handle) == self._default_key or int(handle) in LASTING
        return not lasts and bool(call("cuStreamIsCapturing", handle))

    def _changed(self, key: int, handle: Any) -> Any:
        lasting = key == self._default_key or key in LASTING
        if self.capturing(handle):
            if self._refusal:
                raise CallError("capture-refused", self._refusal, "call it outside the capture")
            self.captured = True
            self.last = self._passing = NONE  # whoever comes next is asked
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
