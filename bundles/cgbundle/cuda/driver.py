"""The CUDA driver `cu`, with checked calls, contexts that are current only while needed, and the order of work on streams.
Importing this does not need a driver; `require` does."""

from __future__ import annotations

import _thread

from ..errors import CallError, MachineError, OutOfMemory
from ..process import FORKS
from . import libcuda
from .libcuda import EVENT_DISABLE_TIMING

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import TracebackType
    from typing import Any

cu: Any = libcuda.Driver()

OUT_OF_MEMORY, ASSERT = 2, 710  # CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_ASSERT


def require() -> None:
    """Raises wrong-machine without a CUDA driver or a GPU, process-forked after a fork."""
    FORKS.check_gpu()
    try:
        error = cu.cuInit(0)
    except OSError as reason:
        raise MachineError("wrong-machine", f"this machine has no CUDA driver: {reason}") from None
    if error:
        raise MachineError("wrong-machine", f"this machine has no usable GPU: cuInit gives {_name(error)}")


def check(call: str, result: int | tuple[Any, ...], detail: str = "") -> Any:
    """The results of driver call `call` without its error: nothing, one value, or a tuple. Raises driver-failed with `detail`;
    OutOfMemory."""
    error = result if isinstance(result, int) else result[0]
    if error:
        about = f" ({detail})" if detail else ""
        if error == OUT_OF_MEMORY:
            raise OutOfMemory("out-of-memory", f"{call}{about}: the GPU has too little free memory")
        if error == ASSERT:
            raise MachineError(
                "driver-failed",
                f"{call}{about}: {_name(error)}: an index is out of range, or an assertion of the model failed",
                "start a new process: this one cannot use the GPU any more; its standard error names the assertion",
            )
        raise MachineError("driver-failed", f"{call}{about}: {_name(error)}")
    return None if isinstance(result, int) else result[1] if len(result) == 2 else result[1:]


def call(name: str, *arguments: Any, detail: str = "") -> Any:
    """Calls a driver function and checks it; not for the fast path."""
    return check(name, getattr(cu, name)(*arguments), detail)


def _name(error: int) -> str:
    failed, text = cu.cuGetErrorName(error)
    return f"error {error}" if failed or not text else str(text.decode())


def device_count() -> int:
    return int(call("cuDeviceGetCount"))


def driver_version() -> int:
    return int(call("cuDriverGetVersion"))


class Context:
    """A share in the primary context of one GPU, which torch, CuPy and others use too. `with context:` makes it current and
    restores the previous one. `stream` is a non-blocking stream; `lend` returns another one, and `back` takes it back. `retain`
    adds a share. The last `release` releases the primary context, which frees everything in it unless another library uses it. In a
    forked process an older context is `inherited` and releases nothing. Raises wrong-machine, driver-failed, process-forked."""

    __slots__ = ("_forks", "_lock", "_shares", "_spare", "_streams", "device", "handle", "index", "stream")

    def __init__(self, index: int) -> None:
        require()
        FORKS.gpu = True
        self._forks = FORKS.number
        count = device_count()
        if not 0 <= index < count:
            raise MachineError("wrong-machine", f"device {index}: this machine has {count} visible GPU{'' if count == 1 else 's'}")
        self.index = index
        self.device = call("cuDeviceGet", index)
        self.handle = call("cuDevicePrimaryCtxRetain", self.device)
        self._shares = 1
        self._lock = _thread.RLock()  # reentrant: an Output may be collected, and release its share, at any point of this thread
        self._streams: list[Any] = []
        self._spare: list[Any] = []
        try:
            with self:
                self.stream = self.lend()
        except BaseException:
            call("cuDevicePrimaryCtxRelease", self.device)
            raise

    @property
    def inherited(self) -> bool:
        return self._forks != FORKS.number

    def __enter__(self) -> Context:
        call("cuCtxPushCurrent", self.handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        call("cuCtxPopCurrent", None)

    def retain(self) -> None:
        with self._lock:
            self._shares += 1

    def release(self) -> None:
        with self._lock:
            self._shares -= 1
            last = self._shares == 0
        if last:
            from contextlib import ExitStack  # a context is created before it is imported

            try:
                with self, ExitStack() as closing:
                    for stream in self._streams:
                        closing.callback(call, "cuStreamDestroy", stream)
            finally:
                call("cuDevicePrimaryCtxRelease", self.device)

    def lend(self) -> Any:
        """A non-blocking stream. Needs the current context."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
            self._streams.append(call("cuStreamCreate", libcuda.STREAM_NON_BLOCKING))
            return self._streams[-1]

    def back(self, stream: Any) -> None:
        with self._lock:
            self._spare.append(stream)

    def attribute(self, number: int) -> int:
        return int(call("cuDeviceGetAttribute", number, self.device))

    @property
    def arch(self) -> str:
        return f"sm_{self.attribute(libcuda.COMPUTE_CAPABILITY_MAJOR)}{self.attribute(libcuda.COMPUTE_CAPABILITY_MINOR)}"

    @property
    def name(self) -> str:
        return str(call("cuDeviceGetName", 100, self.device).split(b"\0")[0].decode())


class Relaxed:
    """Allows this thread to allocate and free while another thread captures a graph, which would otherwise invalidate the capture
    (cuThreadExchangeStreamCaptureMode)."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = call("cuThreadExchangeStreamCaptureMode", libcuda.CAPTURE_MODE_RELAXED)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        call("cuThreadExchangeStreamCaptureMode", self._before)


def free_bytes() -> int:
    free, _ = call("cuMemGetInfo")
    return int(free)


# --- the order of streams -------------------------------------------------------------------------------------------------
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
