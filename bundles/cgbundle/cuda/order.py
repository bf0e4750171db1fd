"""The order of calls that share one arena but come on different streams."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from .driver import Context, check, cu

LASTING = (0, 1)
"""Handles of the legacy default stream, which no one can destroy: NULL and CU_STREAM_LEGACY."""


class StreamOrder:
    """Puts the work of every `begin` ... `end` behind that of the one before, whatever their streams.

    Calls that stay on one stream need no event.  The end of the work is marked when another stream comes, if the last one is sure
    to exist then (ours, or the legacy default stream, which is torch's); else at every `end`.

    `default` is the stream of callers who name none.  The context must be current; `cleanup` gives the event back.
    """

    __slots__ = ("_default_key", "_done", "_handle", "_last", "_lasting", "default")

    def __init__(self, context: Context, cleanup: ExitStack) -> None:
        self._done = check("cuEventCreate", cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        cleanup.callback(_destroy, self._done)
        self.default = context.stream
        self._default_key = self._last = int(self.default)
        self._handle = self.default
        self._lasting = True

    def handle(self, stream: int | None) -> Any:
        """The driver's handle of a stream."""
        return self.default if stream is None else cu.CUstream(stream)

    def begin(self, stream: int | None) -> Any:
        """The stream's handle; what is enqueued on it now runs after the work before the last `end`."""
        key = self._default_key if stream is None else stream
        if key == self._last:
            return self._handle
        handle = self.handle(stream)
        if self._lasting:
            check("cuEventRecord", cu.cuEventRecord(self._done, self._handle))
        check("cuStreamWaitEvent", cu.cuStreamWaitEvent(handle, self._done, 0))
        self._last, self._handle = key, handle
        self._lasting = key == self._default_key or key in LASTING
        return handle

    def end(self, handle: Any) -> None:
        """Marks the end of the work.  A caller's stream is marked now, because it may be gone by the next call."""
        if not self._lasting:
            error = cu.cuEventRecord(self._done, handle)[0]
            if error:
                check("cuEventRecord", (error,))


def _destroy(event: Any) -> None:
    check("cuEventDestroy", cu.cuEventDestroy(event))
