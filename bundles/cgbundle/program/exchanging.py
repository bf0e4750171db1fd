"""Backends that exchange data with other ranks through memory `peer`: one range of addresses, in which every rank's part
(`cuMemCreate`) is on its own device and writable by all ranks. Every process maps all parts."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

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


def reserve(world: World, context: Context, cleanup: ExitStack) -> int:
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


# --- how the processes of a model's ranks connect ------------------------------------------------------------------------


LONGEST, PAUSE = 4096, 0.02  # bytes of a message, seconds between attempts to connect
SLOTS = 4096  # calls that a rank may be ahead of another; calls further apart are not compared
_WORD = Struct("<Q")
_NUMBER = 16  # bits of the program, below the number of the call


class Met(NamedTuple):
    """`parts`: a file descriptor for each rank's part of memory peer; `seed` is equal for all."""

    parts: Sequence[int]
    board: Board
    seed: int


class Board:
    """The calls of the ranks: for each a ring of words (number of the call, program). A rank that calls another program than the
    others would wait for data that never comes, or read wrong data."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = mmap.mmap(descriptor, board_bytes(size)), rank, size
        self._calls, self._checked = 0, 0

    def call(self, program: int) -> None:
        self._calls += 1
        _WORD.pack_into(self._memory, self._at(self._rank, self._calls), self._calls << _NUMBER | program)

    def check(self) -> None:
        """Raises ranks-unlike if another rank called another program, for the calls so far."""
        while self._checked < self._calls:
            number = self._checked + 1
            words = [int(_WORD.unpack_from(self._memory, self._at(rank, number))[0]) for rank in range(self._size)]
            for rank, word in enumerate(words):
                if word >> _NUMBER < number:
                    return  # it has not come so far
                if word >> _NUMBER == number and word != words[self._rank]:
                    mine, other = [row & ((1 << _NUMBER) - 1) for row in (words[self._rank], word)]
                    text = f"call {number}: rank {self._rank} calls program {mine}, and rank {rank} program {other}"
                    raise CallError("ranks-unlike", text)
            self._checked = number

    def close(self) -> None:
        self._memory.close()

    def _at(self, rank: int, number: int) -> int:
        return 8 * (rank * SLOTS + number % SLOTS)


def board_bytes(size: int) -> int:
    return 8 * SLOTS * size


def meet(path: str, rank: int, size: int, bundle: str, part: int, timeout: float) -> Met:
    """Waits for all ranks at `path`. `bundle`: a hash that all have to share; `part`: this rank's descriptor. The caller closes
    descriptors and board. Raises rank-timeout after `timeout` seconds, ranks-unlike for another bundle or a repeated rank."""
    claim, clock = {"rank": rank, "size": size, "bundle": bundle}, _Clock(timeout)
    return _host(path, claim, part, clock) if not rank else _join(path, claim, part, clock)


class _Clock:
    """The time that is left to wait for other ranks."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def late(self, missing: Sequence[int]) -> MachineError:
        who = ", ".join(map(str, missing))
        return MachineError("rank-timeout", f"rank {who} did not connect within {self.seconds:g} s, or has disconnected")


def _host(path: str, claim: Mapping[str, Any], part: int, clock: _Clock) -> Met:
    size: int = claim["size"]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        _listen(listener, path)
        stack.callback(_remove, path)
        descriptors, others = {0: part}, dict[int, socket.socket]()
        while len(descriptors) < size:
            missing = [number for number in range(size) if number not in descriptors]
            listener.settimeout(max(0.001, clock.left))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                raise clock.late(missing) from None
            message, received = _received(connection, clock, missing)
            stack.callback(_close_all, received)
            reason = _reason(claim, message, descriptors) if len(received) == 1 else "it sent no memory"
            if reason:
                _send(connection, {"error": reason})
                raise CallError("ranks-unlike", f"{path}: {reason}")
            descriptors[message["rank"]], others[message["rank"]] = received[0], connection
        seed = int.from_bytes(os.urandom(8), "little") >> 1
        page = os.memfd_create("cgbundle-ranks")
        stack.callback(os.close, page)
        os.truncate(page, board_bytes(size))
        ordered = [descriptors[number] for number in range(size)]
        for connection in others.values():
            _send(connection, {"seed": seed}, [*ordered, page])
        return Met([os.dup(descriptor) for descriptor in ordered], Board(page, 0, size), seed)


def _join(path: str, claim: Mapping[str, Any], part: int, clock: _Clock) -> Met:
    rank, size = claim["rank"], claim["size"]
    with ExitStack() as stack:
        while True:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                connection.connect(path)
                break
            except OSError:
                connection.close()
                if clock.left < 0:
                    raise clock.late([0]) from None
                time.sleep(PAUSE)
        _send(connection, claim, [part])
        message, received = _received(connection, clock, [0])
        if "error" in message or len(received) != size + 1:
            _close_all(received)
            raise CallError("ranks-unlike", f"{path}: rank 0 says: {message.get('error', 'nothing')}")
        *parts, page = received
        stack.callback(os.close, page)
        return Met(parts, Board(page, rank, size), int(message["seed"]))


def _reason(claim: Mapping[str, Any], message: Mapping[str, Any], known: Mapping[int, int]) -> str:
    """Why a process is refused, or ""."""
    rank = message.get("rank")
    if message.get("bundle") != claim["bundle"]:
        return f"rank {rank} has loaded another bundle than rank 0"
    if not isinstance(rank, int) or message.get("size") != claim["size"] or not 0 < rank < claim["size"]:
        return f"a process says that it is rank {rank} of {message.get('size')}, the model has {claim['size']}"
    return f"two processes say that they are rank {rank}" if rank in known else ""


def _listen(listener: socket.socket, path: str) -> None:
    """Listens at a path, and removes a socket that a dead process left there."""
    try:
        listener.bind(path)
    except OSError:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise CallError("ranks-unlike", f"{path}: another process waits there as rank 0") from None
        _remove(path)
        try:
            listener.bind(path)
        except OSError as error:
            raise ValueError(f"rendezvous={path!r}: no socket can be made there: {error.strerror or error}") from None
    listener.listen()


def _send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    with suppress(OSError):  # of one that is gone the other side tells by the time that it takes
        socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors))


def _received(connection: socket.socket, clock: _Clock, missing: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    connection.settimeout(max(0.001, clock.left))
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 16)
    except OSError:
        data = b""
    if not data:
        raise clock.late(missing)
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    return message if isinstance(message, dict) else {}, list(descriptors)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
