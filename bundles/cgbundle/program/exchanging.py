"""Backends that exchange data with other ranks through memory `peer`. This is one address range with a part for each rank. A part
is physical memory (`cuMemCreate`) on its rank's device, and all ranks can write to it. Every process maps all parts."""

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
from ..format.table import Table
from ..gpu.backend import CudaBackend
from ..validate.manifest import GRANULARITY
from ..validate.special_kernels import exchanges, params

if TYPE_CHECKING:
    from ..call.outputs import Caller

SECOND = 10**9


class ExchangingBackend(CudaBackend):
    """A backend that drives all ranks, or a single one. Subclasses set these attributes before `CudaBackend.__init__`: `_world`;
    `_timeout` in seconds; `_peer_base`, the address of memory peer; `_status_words`, the address of pinned memory with a status
    word for each rank; `_peer_cleanup`, which runs after the cleanup of `CudaBackend`."""

    _world: World
    _timeout: float
    _peer_base: int
    _status_words: int
    _peer_cleanup: ExitStack
    _failed: CgbundleError | None = None
    """An error after which results would be wrong. Every later call raises it again."""

    def _allocate_statuses(self, context: Context, cleanup: ExitStack) -> None:
        """Allocates the status words, filled with zeros. Needs a current context."""
        self._status_words = memory.allocate_pinned(4 * self._world.size, "statuses of the ranks")
        cleanup.callback(call_in_context, context, "cuMemFreeHost", self._status_words)
        ctypes.memset(self._status_words, 0, 4 * self._world.size)

    def _part_address(self, rank: int) -> int:
        return self._peer_base + rank * self._world.stride

    def begin(self, stream: int | None) -> Any:
        if self._failed is not None:
            raise type(self._failed)(self._failed.code, str(self._failed), self._failed.hint)
        handle = super().begin(stream)
        if self.order.captured:
            super().end(handle)
            text = "a CUDA graph belongs to one GPU, so it cannot contain a call that runs on several"
            raise CallError("capture-refused", text, "call it outside the capture")
        return handle

    def fast_path(self, program: int, caller: Caller) -> Callable[..., Any]:
        """Returns a fast path that calls `run`, because `run` checks the other ranks first."""

        def replay(addresses: list[int], views: Sequence[Any], stream: Any) -> Any:
            for view in views:
                view.tensor  # noqa: B018  raises stale-view if a call of another thread has replaced the view
            for count in caller.counts:
                count.number += 1  # from here on the outputs of the last replay may be overwritten
            self.run(program, addresses, self.device, stream)
            return caller.finish(stream)

        device = self._context.index
        return lambda addresses, views: during(self, caller.stream(device), lambda stream: replay(addresses, views, stream))

    def _copy_status(self, rank: int, stream: Any) -> None:
        """Copies a rank's status to this process, in stream order."""
        memory.copy(self._status_words + 4 * rank, self._part_address(rank) + self._world.status, 4, stream, target_on_device=False)

    def _check_ranks(self) -> None:
        for rank, word in enumerate((ctypes.c_uint32 * self._world.size).from_address(self._status_words)):
            if word:
                text = f"{self._rank_name(rank)} waited {self._timeout:g} s for rank {word - 1}, which did not respond"
                self._failed = MachineError("rank-timeout", text)
                raise self._failed

    def _rank_name(self, rank: int) -> str:
        return f"rank {rank} on device {self.device}"

    def session(self) -> CudaBackend:
        raise unsupported("sessions, because the ranks exchange data through one memory")

    def update(self, *arguments: Any) -> None:
        raise unsupported("update(), because each rank has its own weights")

    def close(self) -> None:
        if self._context.inherited:
            return
        if self._lock.close():
            with self._shared.updating:
                self._peer_cleanup.close()


def check_occupancy(backend: CudaBackend, bundle: Archive, ranks: int) -> None:
    """Raises wrong-machine unless the backend's GPU can run all blocks of an exchange kernel at the same time, for `ranks` ranks.
    The blocks wait for each other. Needs a current context."""
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
                f"device {context.index} ({context.name}) can run {fit} blocks of {symbol} at once, "
                f"but {ranks} x {blocks} blocks wait for each other"
            )
            raise MachineError("wrong-machine", text, "use larger GPUs, or one GPU for each rank")


def unsupported(what: str) -> CallError:
    return CallError("ranks-refused", f"a model over several GPUs does not support {what}")


# --- memory peer ----------------------------------------------------------------------------------------------------


def create_part(world: World, context: Context, cleanup: ExitStack, *, shared: bool = False) -> int:
    """Allocates a rank's part and returns its handle. `shared`: the handle can be exported to other processes. Raises
    OutOfMemory."""
    prop = AllocationProp()
    prop.type, prop.location.type, prop.location.id = MEM_PINNED, MEM_DEVICE, context.device
    prop.requestedHandleTypes = MEM_FILE_DESCRIPTOR if shared else 0
    try:
        handle = int(call("cuMemCreate", world.stride, prop, 0, detail="memory peer"))
    except OutOfMemory:
        text = f"memory peer: needs {world.stride:,} bytes, the GPU has {free_bytes():,} free"
        raise OutOfMemory("out-of-memory", text) from None
    cleanup.callback(call_in_context, context, "cuMemRelease", handle)
    return handle


def reserve(world: World, context: Context, cleanup: ExitStack) -> int:
    size = world.stride * world.size
    base = int(call("cuMemAddressReserve", size, GRANULARITY, 0, 0))
    cleanup.callback(call_in_context, context, "cuMemAddressFree", base, size)
    return base


def map_part(world: World, at: int, handle: int, contexts: Iterable[Context], cleanup: ExitStack) -> None:
    """Maps a part at an address and lets the devices of `contexts` write to it. One of these contexts must be current. Raises
    wrong-machine."""
    size, users = world.stride, {context.device: context for context in contexts}
    call("cuMemMap", at, size, 0, handle, 0)
    cleanup.callback(call_in_context, next(iter(users.values())), "cuMemUnmap", at, size)
    for device, context in users.items():
        access = AccessDesc()
        access.location.type, access.location.id, access.flags = MEM_DEVICE, device, MEM_ACCESS_READ_WRITE
        if cu.cuMemSetAccess(at, size, access, 1):
            text = f"device {context.index} cannot write to the memory of another rank's device"
            hint = "the GPUs of a model have to reach each other, by NVLink or PCIe: `nvidia-smi topo -p2p w` shows which do"
            raise MachineError("wrong-machine", text, hint)


def initialize_part(world: World, at: int, limit: int, stream: Any) -> None:
    """Fills a rank's part with zeros, stores the time limit in nanoseconds, and synchronizes. Needs a current context."""
    memory.fill(at, world.stride, 0, stream)
    number = ctypes.c_uint64(limit)
    memory.copy(at + world.limit, ctypes.addressof(number), 8, stream, source_on_device=False)
    call("cuStreamSynchronize", stream)


def call_in_context(context: Context, name: str, *arguments: Any) -> None:
    """Makes the context current and calls a cleanup function of the driver."""
    with context:
        call(name, *arguments)


# --- connecting the processes of the ranks --------------------------------------------------------------------------------


MESSAGE_BYTES, RETRY_SECONDS = 4096, 0.02  # maximum bytes of a message, seconds between attempts to connect
LOGGED_CALLS = 4096  # entries of a rank's ring; if a rank is further ahead, its calls are not compared
_ENTRY = Struct("<Q")
_PROGRAM_BITS = 16  # the lowest bits of an entry hold the program, the others the number of the call


class Connected(NamedTuple):
    """`parts`: a file descriptor for each rank's part of memory peer; `seed`: the same random number in all processes."""

    parts: Sequence[int]
    call_log: CallLog
    seed: int


class CallLog:
    """Shared memory with the calls of all ranks, to detect different calls. Every rank has a ring of entries (call number,
    program). If ranks call different programs, they wait for data that never comes, or read wrong data."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = mmap.mmap(descriptor, call_log_bytes(size)), rank, size
        self._calls, self._checked = 0, 0

    def record(self, program: int) -> None:
        self._calls += 1
        _ENTRY.pack_into(self._memory, self._at(self._rank, self._calls), self._calls << _PROGRAM_BITS | program)

    def compare(self) -> None:
        """Compares the calls that all ranks have made. Raises ranks-unlike if a rank called a different program."""
        while self._checked < self._calls:
            number = self._checked + 1
            words = [int(_ENTRY.unpack_from(self._memory, self._at(rank, number))[0]) for rank in range(self._size)]
            for rank, word in enumerate(words):
                if word >> _PROGRAM_BITS < number:
                    return  # that rank has not made this call yet
                if word >> _PROGRAM_BITS == number and word != words[self._rank]:
                    mine, other = [row & ((1 << _PROGRAM_BITS) - 1) for row in (words[self._rank], word)]
                    text = f"call {number}: rank {self._rank} calls program {mine}, and rank {rank} program {other}"
                    raise CallError("ranks-unlike", text)
            self._checked = number

    def close(self) -> None:
        self._memory.close()

    def _at(self, rank: int, number: int) -> int:
        return 8 * (rank * LOGGED_CALLS + number % LOGGED_CALLS)


def call_log_bytes(size: int) -> int:
    return 8 * LOGGED_CALLS * size


def connect_ranks(path: str, rank: int, size: int, bundle: str, part: int, timeout: float) -> Connected:
    """Connects the processes of all ranks by a socket at `path`. `bundle`: a hash, which must be equal in all processes; `part`:
    the file descriptor of this rank's part. The caller closes the returned descriptors and call log. Raises rank-timeout after
    `timeout` seconds, ranks-unlike for a different bundle or a repeated rank."""
    claim, deadline = {"rank": rank, "size": size, "bundle": bundle}, _Deadline(timeout)
    return _accept_ranks(path, claim, part, deadline) if not rank else _connect_to_rank_0(path, claim, part, deadline)


class _Deadline:
    """A time limit for the other ranks to connect."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def timeout_error(self, missing: Sequence[int]) -> MachineError:
        who = ", ".join(map(str, missing))
        return MachineError("rank-timeout", f"rank {who} did not connect within {self.seconds:g} s, or has disconnected")


def _accept_ranks(path: str, claim: Mapping[str, Any], part: int, deadline: _Deadline) -> Connected:
    size: int = claim["size"]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        _listen(listener, path)
        stack.callback(_remove, path)
        descriptors, others = {0: part}, dict[int, socket.socket]()
        while len(descriptors) < size:
            missing = [number for number in range(size) if number not in descriptors]
            listener.settimeout(max(0.001, deadline.left))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                raise deadline.timeout_error(missing) from None
            message, received = _receive(connection, deadline, missing)
            stack.callback(_close_all, received)
            reason = _mismatch(claim, message, descriptors) if len(received) == 1 else "it sent no descriptor of its memory"
            if reason:
                _send(connection, {"error": reason})
                raise CallError("ranks-unlike", f"{path}: {reason}")
            descriptors[message["rank"]], others[message["rank"]] = received[0], connection
        seed = int.from_bytes(os.urandom(8), "little") >> 1
        page = os.memfd_create("cgbundle-ranks")
        stack.callback(os.close, page)
        os.truncate(page, call_log_bytes(size))
        ordered = [descriptors[number] for number in range(size)]
        for connection in others.values():
            _send(connection, {"seed": seed}, [*ordered, page])
        return Connected([os.dup(descriptor) for descriptor in ordered], CallLog(page, 0, size), seed)


def _connect_to_rank_0(path: str, claim: Mapping[str, Any], part: int, deadline: _Deadline) -> Connected:
    rank, size = claim["rank"], claim["size"]
    with ExitStack() as stack:
        while True:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                connection.connect(path)
                break
            except OSError:
                connection.close()
                if deadline.left < 0:
                    raise deadline.timeout_error([0]) from None
                time.sleep(RETRY_SECONDS)
        _send(connection, claim, [part])
        message, received = _receive(connection, deadline, [0])
        if "error" in message or len(received) != size + 1:
            _close_all(received)
            raise CallError("ranks-unlike", f"{path}: rank 0 says: {message.get('error', 'nothing')}")
        *parts, page = received
        stack.callback(os.close, page)
        return Connected(parts, CallLog(page, rank, size), int(message["seed"]))


def _mismatch(claim: Mapping[str, Any], message: Mapping[str, Any], known: Mapping[int, int]) -> str:
    """Returns the reason to refuse a process, or ""."""
    rank = message.get("rank")
    if message.get("bundle") != claim["bundle"]:
        return f"rank {rank} loaded a different bundle than rank 0"
    if not isinstance(rank, int) or message.get("size") != claim["size"] or not 0 < rank < claim["size"]:
        return f"a process connected as rank {rank} of {message.get('size')}, but the model has {claim['size']} ranks"
    return f"two processes connected as rank {rank}" if rank in known else ""


def _listen(listener: socket.socket, path: str) -> None:
    """Listens at a path. Replaces a socket that a dead process left there."""
    try:
        listener.bind(path)
    except OSError:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise CallError("ranks-unlike", f"{path}: another process already listens there as rank 0") from None
        _remove(path)
        try:
            listener.bind(path)
        except OSError as error:
            raise ValueError(f"rendezvous={path!r}: cannot create a socket there: {error.strerror or error}") from None
    listener.listen()


def _send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    with suppress(OSError):  # if the receiver is gone, its process or this one reports a timeout
        socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors))


def _receive(connection: socket.socket, deadline: _Deadline, missing: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    connection.settimeout(max(0.001, deadline.left))
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 16)
    except OSError:
        data = b""
    if not data:
        raise deadline.timeout_error(missing)
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
