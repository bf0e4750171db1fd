"""One call's hold on the memories of a backend."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import driver
from .driver import cu

if TYPE_CHECKING:
    from .device import CudaBackend


class Turn:
    """See `CudaBackend.turn`.  A part of the backend: it works on its insides, since every microsecond of a call is measured."""

    __slots__ = ("_backend", "_handle", "_stream")

    def __init__(self, backend: CudaBackend, stream: int | None) -> None:
        self._backend, self._stream = backend, stream

    def __enter__(self) -> Any:
        backend = self._backend
        backend.lock.acquire()
        try:
            error = cu.cuCtxPushCurrent(backend._current().handle)[0]
            if error:
                driver.check("cuCtxPushCurrent", (error,))
        except BaseException:
            backend.lock.release()
            raise
        try:
            self._handle = backend._order.begin(self._stream)
        except BaseException:
            self._leave()
            raise
        return self._handle

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._backend._order.end(self._handle)
        finally:
            self._leave()

    def _leave(self) -> None:
        error = cu.cuCtxPopCurrent()[0]
        self._backend.lock.release()
        if error:
            driver.check("cuCtxPopCurrent", (error,))
