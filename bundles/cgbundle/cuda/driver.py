"""The CUDA driver: every call is checked, and the context is current only while it is needed.

`cu` are its functions; whether there is a driver shows at the first call: `require` says so, importing this module does not.
"""

from __future__ import annotations

import _thread

from ..call.forks import FORKS
from ..errors import MachineError, OutOfMemory
from . import libcuda

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

cu: Any = libcuda.Driver()

OUT_OF_MEMORY, ASSERT = 2, 710
"""CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_ASSERT."""


def require() -> None:
    """Raises wrong-machine without a CUDA driver or a GPU, process-forked where a fork has lost it."""
    FORKS.check_gpu()
    try:
        error = cu.cuInit(0)
    except OSError as reason:
        raise MachineError("wrong-machine", f"this machine has no CUDA driver: {reason}") from None
    if error:
        raise MachineError("wrong-machine", f"this machine has no usable GPU: cuInit gives {_name(error)}")


def check(call: str, result: int | tuple[Any, ...], detail: str = "") -> Any:
    """What the driver call `call` returned beside its error: nothing, one value, or a tuple.

    Raises driver-failed naming the call, the driver's error and `detail`; OutOfMemory for that error.
    """
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
    """What a function of the driver answers, checked: for calls of which not every microsecond counts."""
    return check(name, getattr(cu, name)(*arguments), detail)


def _name(error: int) -> str:
    failed, text = cu.cuGetErrorName(error)
    return f"error {error}" if failed or not text else str(text.decode())


def device_count() -> int:
    return int(call("cuDeviceGetCount"))


def driver_version() -> int:
    """As the driver reports it: 13000 is 13.0."""
    return int(call("cuDriverGetVersion"))


class Context:
    """A share in the primary context of one GPU: torch, CuPy and the like in this process use the same one.

    `with context:` makes it current in the calling thread and restores what was current before.  `stream` is a non-blocking
    stream that lives as long; so do those of `lend`, which gives one that nobody else uses until it is given `back`.  Whoever hands
    the context on takes a further share with `retain`; with the last share the driver's own count is released, and with it
    everything left in the context unless another library uses it too.

    In a forked process the driver does not work: there a context that was made before is `inherited`, and releases nothing.

    Raises wrong-machine, driver-failed, process-forked.
    """

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
        self._lock = _thread.RLock()  # an Output may be collected, and release its share, at any point of this thread
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
        """Whether this process was forked since."""
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
            from contextlib import ExitStack  # a context is made before it is imported

            try:
                with self, ExitStack() as closing:
                    for stream in self._streams:
                        closing.callback(call, "cuStreamDestroy", stream)
            finally:
                call("cuDevicePrimaryCtxRelease", self.device)

    def lend(self) -> Any:
        """A non-blocking stream; the context must be current."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
            self._streams.append(call("cuStreamCreate", libcuda.STREAM_NON_BLOCKING))
            return self._streams[-1]

    def back(self, stream: Any) -> None:
        with self._lock:
            self._spare.append(stream)

    def attribute(self, number: int) -> int:
        """A device attribute by its number in cuda.h."""
        return int(call("cuDeviceGetAttribute", number, self.device))

    @property
    def arch(self) -> str:
        """The GPU's compute capability as in "sm_90"."""
        return f"sm_{self.attribute(libcuda.COMPUTE_CAPABILITY_MAJOR)}{self.attribute(libcuda.COMPUTE_CAPABILITY_MINOR)}"

    @property
    def name(self) -> str:
        return str(call("cuDeviceGetName", 100, self.device).split(b"\0")[0].decode())


class Relaxed:
    """While it is held, this thread may allocate and free beside another one's capture of a graph.  Without it the driver forbids
    that, and the capture is lost (cuThreadExchangeStreamCaptureMode)."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = call("cuThreadExchangeStreamCaptureMode", libcuda.CAPTURE_MODE_RELAXED)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        call("cuThreadExchangeStreamCaptureMode", self._before)


def free_bytes() -> int:
    """Free bytes of the current context's GPU, as the driver counts them."""
    free, _ = call("cuMemGetInfo")
    return int(free)
