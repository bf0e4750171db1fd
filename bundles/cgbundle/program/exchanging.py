"""What a backend has that exchanges data with other ranks: memory peer, and how it learns that a rank has waited in vain."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..cuda import memory
from ..cuda.driver import Context, check, cu
from ..cuda.libcuda import MULTIPROCESSORS
from ..errors import CallError, CgbundleError, MachineError
from ..format.archive import Archive
from ..format.entries import all_programs
from ..gpu.backend import CudaBackend
from ..tables.collectives import exchanges, params
from ..tables.table import Table
from .peer_memory import within

if TYPE_CHECKING:
    from ..call.fast_path import Caller
    from ..format.schema import World
    from ..weights.contents import Contents, OpenFile

SECOND = 10**9


class ExchangingBackend(CudaBackend):
    """A backend over several GPUs, or of one rank of them.

    Subclasses set, before they call `CudaBackend.__init__`, what is here: `_world`, the manifest's row; `_timeout` in seconds;
    `_base`, where memory peer lies; `_words`, pinned memory with a status for each rank; `_outside`, what outlives the backend.
    """

    _world: World
    _timeout: float
    _base: int
    _words: int
    _outside: ExitStack
    _failed: CgbundleError | None = None
    """What went wrong, from which on no call is right."""

    def _begin_statuses(self, context: Context, outside: ExitStack) -> None:
        """The context is current."""
        self._words = memory.allocate_pinned(4 * self._world.size, "statuses of the ranks")
        outside.callback(within, context, "cuMemFreeHost", self._words)
        ctypes.memset(self._words, 0, 4 * self._world.size)

    def _part(self, rank: int) -> int:
        """Where a rank's part of memory peer begins."""
        return self._base + rank * self._world.stride

    def begin(self, stream: int | None) -> Any:
        if self._failed is not None:
            raise type(self._failed)(self._failed.code, str(self._failed), self._failed.hint)
        handle = super().begin(stream)
        if self.order.captured:
            super().end(handle)
            text = "a call over several GPUs cannot become part of a CUDA graph, which is of one"
            raise CallError("capture-refused", text, "call it outside the capture")
        return handle

    def fast_path(self, program: int, caller: Caller) -> None:
        """None: every call begins with a look at the other ranks."""

    def _note(self, rank: int, stream: Any) -> None:
        """Copies a rank's status to where this process reads it, in the order of its stream."""
        memory.copy(self._words + 4 * rank, self._part(rank) + self._world.status, 4, stream, target_on_device=False)

    def _check_ranks(self) -> None:
        """Raises rank-timeout where a rank has waited for another one in vain."""
        words = (ctypes.c_uint32 * self._world.size).from_address(self._words)
        for rank, word in enumerate(words):
            if word:
                text = f"{self._place(rank)} has waited {self._timeout:g} s for rank {word - 1} in vain"
                self._failed = MachineError("rank-timeout", text)
                raise self._failed

    def _place(self, rank: int) -> str:
        return f"rank {rank} on device {self.device}"

    def session(self) -> CudaBackend:
        raise refused("sessions: the ranks exchange data through one memory")

    def update(
        self,
        contents: Mapping[int, Contents],
        sessions: Sequence[CudaBackend],
        files: Sequence[OpenFile],
        ready: Callable[[], None],
    ) -> None:
        raise refused("other weights in place: each rank has its own")

    def close(self) -> None:
        """As `CudaBackend.close`; the memory that ranks share goes last."""
        if self._context.inherited:
            return
        if self._lock.close():
            with self._shared.updating:
                self._outside.close()


def check_room(backend: CudaBackend, bundle: Archive, ranks: int) -> None:
    """Raises wrong-machine unless all blocks of each exchange fit on the backend's GPU at once, where `ranks` of the model are:
    they wait for each other.  The bundle is open, and the context current."""
    (world,) = bundle.manifest.world
    files = {step.file for program in all_programs(bundle.manifest) for step in program.steps if step.file}
    needed: dict[tuple[str, str, int], int] = {}
    for each in [one for file in files for one in exchanges(Table(bundle.data(file), file), world)]:
        kernel = each.image, each.symbol, each.threads
        needed[kernel] = max(needed.get(kernel, 0), each.grid)
    context, count = backend._context, backend._context.attribute(MULTIPROCESSORS)
    for (image, symbol, threads), blocks in needed.items():
        function = backend._shared._modules.function(image, symbol, params(world.size), ())
        fit = count * int(check("cuOccupancyMaxActiveBlocks", cu.cuOccupancyMaxActiveBlocks(function, threads, 0)))
        if blocks * ranks > fit:
            raise MachineError(
                "wrong-machine",
                f"device {context.index} ({context.name}) runs {fit} blocks of {symbol} at once, {ranks} x {blocks} wait together",
                "take larger GPUs, or one for each rank",
            )


def refused(what: str) -> CallError:
    return CallError("ranks-refused", f"a model over several GPUs has no {what}")
