"""Connects the processes of a model's ranks over a Unix socket, which passes memory handles as file descriptors. Rank 0 listens,
the others connect, and each sends its rank, its bundle's hash, and the descriptor of its part of memory peer. Then each gets all
descriptors, and a shared page of memory where ranks record their calls."""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from struct import Struct
from typing import Any, NamedTuple

from ..errors import CallError, MachineError

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
