"""What a backend moves for its callers, in the order of a stream: outputs that outlive it, and copies of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..session.locks import Gate
from . import driver, memory
from .driver import Context, cu
from .memory import Output
from .stream_order import StreamOrder


class Copies:
    """A part of `CudaBackend`, in which `lock`, `_order` and `_current` are set."""

    lock: Gate
    _order: StreamOrder

    if TYPE_CHECKING:

        def _current(self) -> Context: ...

    def allocate(self, size: int, stream: int | None = None) -> Output:
        """Fresh GPU memory that outlives the backend, ready in the order of the stream."""
        with self.lock, self._current() as context:
            return Output(context, size, self._order.handle(stream))

    def copy_out(self, address: int, size: int, stream: int | None = None) -> Output:
        """A copy of GPU memory that the next run leaves alone."""
        with self.lock, self._current() as context:
            handle = self._order.begin(stream)
            output = Output(context, size, handle)
            memory.copy(output.address, address, size, handle)
            self._order.end(handle)
            return output

    def copy(
        self,
        target: int,
        source: int,
        size: int,
        stream: int | None = None,
        *,
        target_on_device: bool = True,
        source_on_device: bool = True,
    ) -> None:
        """Copies bytes in the order of the stream: see `memory.copy`."""
        with self.lock, self._current():
            handle = self._order.begin(stream)
            memory.copy(target, source, size, handle, target_on_device=target_on_device, source_on_device=source_on_device)
            self._order.end(handle)

    def copy_rows(self, target: int, source: int, width: int, rows: int, stream: int | None = None, **places: Any) -> None:
        """Copies rows in the order of the stream: see `memory.copy_rows`."""
        with self.lock, self._current():
            handle = self._order.begin(stream)
            memory.copy_rows(target, source, width, rows, handle, **places)
            self._order.end(handle)

    def to_host(self, target: int, source: int, size: int, stream: int | None = None) -> None:
        """Copies GPU memory to the host address `target` and waits for it."""
        with self.lock:
            self.copy(target, source, size, stream, target_on_device=False)
            self.synchronize(stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Waits for all work on the stream; a fault of a kernel shows here as driver-failed."""
        with self.lock, self._current():
            handle = self._order.handle(stream)
            driver.check("cuStreamSynchronize", cu.cuStreamSynchronize(handle))
