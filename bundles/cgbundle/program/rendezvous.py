"""How the processes of a model's ranks find each other: a Unix socket, over which handles of memory pass as file descriptors.

Rank 0 listens at a path, the others connect.  Each says which rank of which bundle it is, and gives the descriptor of its part of
memory peer; when all have come, each gets the descriptors of all, and of a board that they share: a page of memory in which every
rank writes down what it calls.  The socket is gone then.
"""

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

LONGEST, PAUSE = 4096, 0.02
"""Bytes of a message, and seconds between two tries to connect."""

SLOTS = 4096
"""Calls that a rank may be ahead of another one: those of further ones are not compared."""

_WORD = Struct("<Q")
_NUMBER = 16
"""Bits of a word below the number of a call: its program."""


class Met(NamedTuple):
    """`parts`: a file descriptor for each rank's part of memory peer, the own one among them; `seed` is the same for all."""

    parts: Sequence[int]
    board: Board
    seed: int


class Board:
    """What the ranks of a model have called: for each a ring of words, the number of a call and its program.

    A rank that calls another program than the others would wait for data that never comes, or take other data for it.
    """

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = mmap.mmap(descriptor, board_bytes(size)), rank, size
        self._calls, self._checked = 0, 0

    def call(self, program: int) -> None:
        """Writes down that this rank calls a program."""
        self._calls += 1
        self._put(self._calls, program)

    def check(self) -> None:
        """Raises ranks-unlike where another rank has called something else than this one, as far as it has called."""
        while self._checked < self._calls:
            number = self._checked + 1
            mine_word = self._word(self._rank, number)
            for rank in range(self._size):
                word = self._word(rank, number)
                if word >> _NUMBER < number:
                    return  # it has not come so far
                if word >> _NUMBER == number and word != mine_word:
                    mine, other = [number_and_program & ((1 << _NUMBER) - 1) for number_and_program in (mine_word, word)]
                    text = f"call {number}: rank {self._rank} calls program {mine}, and rank {rank} program {other}"
                    raise CallError("ranks-unlike", text)
            self._checked = number

    def close(self) -> None:
        self._memory.close()

    def _put(self, number: int, program: int) -> None:
        _WORD.pack_into(self._memory, self._at(self._rank, number), number << _NUMBER | program)

    def _word(self, rank: int, number: int) -> int:
        return int(_WORD.unpack_from(self._memory, self._at(rank, number))[0])

    def _at(self, rank: int, number: int) -> int:
        return 8 * (rank * SLOTS + number % SLOTS)


def board_bytes(size: int) -> int:
    return 8 * SLOTS * size


def meet(path: str, rank: int, size: int, bundle: str, part: int, timeout: float) -> Met:
    """Waits for the processes of all ranks at `path`.  `bundle`: what all have to have loaded, as a hash; `part`: the descriptor of
    this rank's part.  The caller closes the descriptors, and the board.

    Raises rank-timeout where not all have come after so many seconds, ranks-unlike for another bundle or a rank that comes twice.
    """
    until = time.monotonic() + timeout
    claim = {"rank": rank, "size": size, "bundle": bundle}
    return _host(path, claim, part, until, timeout) if not rank else _join(path, claim, part, until, timeout)


def _host(path: str, claim: Mapping[str, Any], part: int, until: float, timeout: float) -> Met:
    size: int = claim["size"]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        _listen(listener, path)
        stack.callback(_remove, path)
        descriptors, others = {0: part}, dict[int, socket.socket]()
        while len(descriptors) < size:
            missing = [number for number in range(size) if number not in descriptors]
            connection = stack.enter_context(_accepted(listener, until, missing, timeout))
            message, received = _received(connection, until, missing, timeout)
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


def _join(path: str, claim: Mapping[str, Any], part: int, until: float, timeout: float) -> Met:
    rank, size = claim["rank"], claim["size"]
    with ExitStack() as stack:
        connection = stack.enter_context(_connected(path, until, timeout))
        _send(connection, claim, [part])
        message, received = _received(connection, until, [0], timeout)
        if "error" in message or len(received) != size + 1:
            _close_all(received)
            raise CallError("ranks-unlike", f"{path}: rank 0 says: {message.get('error', 'nothing')}")
        *parts, page = received
        stack.callback(os.close, page)
        return Met(parts, Board(page, rank, size), int(message["seed"]))


def _reason(claim: Mapping[str, Any], message: Mapping[str, Any], known: Mapping[int, int]) -> str:
    """Why a process cannot take part, or ""."""
    rank = message.get("rank")
    if message.get("bundle") != claim["bundle"]:
        return f"rank {rank} has loaded another bundle than rank 0"
    if not isinstance(rank, int) or message.get("size") != claim["size"] or not 0 < rank < claim["size"]:
        return f"a process says that it is rank {rank} of {message.get('size')}, the model has {claim['size']}"
    return f"two processes say that they are rank {rank}" if rank in known else ""


def _listen(listener: socket.socket, path: str) -> None:
    """Listens at a path; a socket that a process left there which is gone is removed."""
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


def _accepted(listener: socket.socket, until: float, missing: Sequence[int], timeout: float) -> socket.socket:
    listener.settimeout(max(0.001, until - time.monotonic()))
    try:
        return listener.accept()[0]
    except TimeoutError:
        raise _late(missing, timeout) from None


def _connected(path: str, until: float, timeout: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > until:
                raise _late([0], timeout) from None
            time.sleep(PAUSE)
            continue
        return connection


def _send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    with suppress(OSError):  # of one that is gone the other side tells by the time that it takes
        socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors))


def _received(connection: socket.socket, until: float, missing: Sequence[int], timeout: float) -> tuple[dict[str, Any], list[int]]:
    connection.settimeout(max(0.001, until - time.monotonic()))
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 16)
    except OSError:
        raise _late(missing, timeout) from None
    if not data:
        raise _late(missing, timeout)
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    return message if isinstance(message, dict) else {}, list(descriptors)


def _late(missing: Sequence[int], timeout: float) -> MachineError:
    who = ", ".join(map(str, missing))
    return MachineError("rank-timeout", f"rank {who} did not connect within {timeout:g} s, or has disconnected")


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
