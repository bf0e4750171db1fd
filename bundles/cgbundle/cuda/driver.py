"""The CUDA driver `cu`, with checked calls, and contexts that are current only while needed. Importing this does not need a driver;
`require` does."""

from __future__ import annotations

import _thread

from ..errors import MachineError, OutOfMemory
from ..process import FORKS
from . import libcuda

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
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
