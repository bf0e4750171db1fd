"""Backends that exchange data with other ranks through memory `peer`: one range of addresses, in which every rank's part
(`cuMemCreate`) is on its own device and writable by all ranks. Every process maps all parts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..call.locks import during
from ..cuda import memory
from ..cuda.driver import Context, call, cu, free_bytes
from ..cuda.libcuda import MEM_ACCESS_READ_WRITE, MEM_DEVICE, MEM_FILE_DESCRIPTOR, MEM_PINNED, MULTIPROCESSORS
from ..cuda.structures import AccessDesc, AllocationProp
from ..errors import CallError, CgbundleError, MachineError, OutOfMemory
from ..format.archive import Archive
from ..format.file_names import all_programs
from ..format.schema import World
from ..gpu.backend import CudaBackend
from ..tables.collectives import exchanges, params
from ..tables.table import Table
from ..validate.manifest import GRANULARITY

if TYPE_CHECKING:
    from ..call.outputs import Caller

SECOND = 10**9


class ExchangingBackend(CudaBackend):
    """A backend over several GPUs, or of one rank. Subclasses set these attributes before `CudaBackend.__init__`: `_world`,
    `_timeout` in seconds, `_base` of memory peer, `_words` (pinned memory with a status per rank), `_outside` (cleanup after the
    backend's)."""

    _world: World
    _timeout: float
    _base: int
    _words: int
    _outside: ExitStack
    _failed: CgbundleError | None = None
    """What went wrong, from which on no call is right."""

    def _begin_statuses(self, context: Context, outside: ExitStack) -> None:
        """Needs a current context."""
        self._words = memory.allocate_pinned(4 * self._world.size, "statuses of the ranks")
        outside.callback(within, context, "cuMemFreeHost", self._words)
        ctypes.memset(self._words, 0, 4 * self._world.size)

    def _part(self, rank: int) -> int:
        """The address of a rank's part of memory peer."""
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

    def fast_path(self, program: int, caller: Caller) -> Callable[..., Any]:
        """Uses `run`, which first checks the other ranks."""

        def replayed(addresses: list[int], views: Sequence[Any], stream: Any) -> Any:
            for view in views:
                view.tensor  # noqa: B018  raises stale-view where another thread's call came between
            for count in caller.counts:
                count.number += 1  # from here on the outputs of the last replay may be overwritten
            self.run(program, addresses, self.device, stream)
            return caller.finish(stream)

        device = self._context.index
        return lambda addresses, views: during(self, caller.stream(device), lambda stream: replayed(addresses, views, stream))

    def _note(self, rank: int, stream: Any) -> None:
        """Copies a rank's status to this process, in stream order."""
        memory.copy(self._words + 4 * rank, self._part(rank) + self._world.status, 4, stream, target_on_device=False)

    def _check_ranks(self) -> None:
        """Raises rank-timeout if a rank has waited for another one in vain."""
        for rank, word in enumerate((ctypes.c_uint32 * self._world.size).from_address(self._words)):
            if word:
                text = f"{self._place(rank)} has waited {self._timeout:g} s for rank {word - 1} in vain"
                self._failed = MachineError("rank-timeout", text)
                raise self._failed

    def _place(self, rank: int) -> str:
        return f"rank {rank} on device {self.device}"

    def session(self) -> CudaBackend:
        raise refused("sessions: the ranks exchange data through one memory")

    def update(self, *arguments: Any) -> None:
        raise refused("other weights in place: each rank has its own")

    def close(self) -> None:
        """As `CudaBackend.close`; the memory that ranks share is freed last."""
        if self._context.inherited:
            return
        if self._lock.close():
            with self._shared.updating:
                self._outside.close()


def check_room(backend: CudaBackend, bundle: Archive, ranks: int) -> None:
    """Raises wrong-machine unless all blocks of each exchange, of `ranks` ranks, run on the backend's GPU at once: they wait for
    each other. Needs a current context."""
    world = bundle.manifest.world
    assert world is not None
    files = {step.file for program in all_programs(bundle.manifest) for step in program.steps if step.file}
    needed: dict[tuple[str, str, int], int] = {}
    for exchange in [one for file in files for one in exchanges(Table(bundle.data(file), file), world)]:
        kernel = exchange.image, exchange.symbol, exchange.threads
        needed[kernel] = max(needed.get(kernel, 0), exchange.grid)
    context, count = backend._context, backend._context.attribute(MULTIPROCESSORS)
    for (image, symbol, threads), blocks in needed.items():
        function = backend._shared._modules.function(image, symbol, params(world.size), ())
        fit = count * int(call("cuOccupancyMaxActiveBlocks", function, threads, 0))
        if blocks * ranks > fit:
            text = (
                f"device {context.index} ({context.name}) runs {fit} blocks of {symbol} at once, {ranks} x {blocks} wait together"
            )
            raise MachineError("wrong-machine", text, "take larger GPUs, or one for each rank")


def refused(what: str) -> CallError:
    return CallError("ranks-refused", f"a model over several GPUs has no {what}")


# --- memory peer ----------------------------------------------------------------------------------------------------


def create_part(world: World, context: Context, cleanup: ExitStack, *, shared: bool = False) -> int:
    """The handle of a rank's part. `shared`: exportable to other processes. Raises OutOfMemory."""
    prop = AllocationProp()
    prop.type, prop.location.type, prop.location.id = MEM_PINNED, MEM_DEVICE, context.device
    prop.requestedHandleTypes = MEM_FILE_DESCRIPTOR if shared else 0
    try:
        handle = int(call("cuMemCreate", world.stride, prop, 0, detail="memory peer"))
    except OutOfMemory:
        text = f"memory peer: needs {world.stride:,} bytes, the GPU has {free_bytes():,} free"
        raise OutOfMemory("out-of-memory", text) from None
    cleanup.callback(within, context, "cuMemRelease", handle)
    return handle


def export_part(handle: int) -> int:
    """A file descriptor for a shared part, which the caller closes."""
    return int(call("cuMemExportToShareableHandle", handle, MEM_FILE_DESCRIPTOR, 0))


def import_part(descriptor: int, context: Context, cleanup: ExitStack) -> int:
    """The handle of another process's part."""
    handle = int(call("cuMemImportFromShareableHandle", descriptor, MEM_FILE_DESCRIPTOR, detail="memory peer"))
    cleanup.callback(within, context, "cuMemRelease", handle)
    return handle


def reserve(world: World, context: Context, cleanup: ExitStack) -> int:
    """Reserves addresses for memory peer."""
    size = world.stride * world.size
    base = int(call("cuMemAddressReserve", size, GRANULARITY, 0, 0))
    cleanup.callback(within, context, "cuMemAddressFree", base, size)
    return base


def map_part(world: World, at: int, handle: int, contexts: Iterable[Context], cleanup: ExitStack) -> None:
    """Maps a part, writable by the devices of `contexts`, one of which is current. Raises wrong-machine."""
    size, users = world.stride, {context.device: context for context in contexts}
    call("cuMemMap", at, size, 0, handle, 0)
    cleanup.callback(within, next(iter(users.values())), "cuMemUnmap", at, size)
    for device, context in users.items():
        access = AccessDesc()
        access.location.type, access.location.id, access.flags = MEM_DEVICE, device, MEM_ACCESS_READ_WRITE
        if cu.cuMemSetAccess(at, size, access, 1):
            text = f"device {context.index} cannot write to the memory of another rank's device"
            hint = "the GPUs of a model have to reach each other, by NVLink or PCIe: `nvidia-smi topo -p2p w` shows which do"
            raise MachineError("wrong-machine", text, hint)


def begin_part(world: World, at: int, limit: int, stream: Any) -> None:
    """Fills a rank's part with zeros and its time limit in nanoseconds, and waits. Needs a current context."""
    memory.fill(at, world.stride, 0, stream)
    number = ctypes.c_uint64(limit)
    memory.copy(at + world.limit, ctypes.addressof(number), 8, stream, source_on_device=False)
    call("cuStreamSynchronize", stream)


def within(context: Context, name: str, *arguments: Any) -> None:
    """Calls a cleanup function of the driver with the context current."""
    with context:
        call(name, *arguments)
