"""A process that imports once what many need, and is forked for each of them: importing torch and Inductor takes 4 to 13 seconds.
It is a process of its own, since CUDA does not survive a fork, and the build may have started it.

The build sends the file of an order and three pipes over a Unix socket.  The forked process reads requests from the first pipe
and answers on the second.  The server writes its number and, when it has ended, its status to the third.  It leads a process group.
Server and forked processes end with the thread that started the server."""

from __future__ import annotations

import gc
import os
import pickle
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, NoReturn

from .workers import end_group, end_with_parent

LARGEST = 1 << 16
"""Bytes that are read at once: more than any path has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """`argument` goes to the server's function, and `environment` is the process's; `log` gets what it prints."""

    argument: str
    environment: dict[str, str]
    log: Path


class ForkedProcess:
    """A process of a fork server, on the build's side: `requests` and `answers` are its pipes."""

    def __init__(self, requests: int, answers: int, life: int) -> None:
        self.requests, self.answers = os.fdopen(requests, "w"), os.fdopen(answers)
        self._life = life
        self._told = b""
        self._reading = threading.Lock()

    def wait(self) -> int | None:
        """Waits for the end.  The exit status, negative for a signal, or None where the server ended before it."""
        with self._reading:
            self._read(None)
            lines = self._told.split()
        return int(lines[1]) if len(lines) == 2 else None

    def end(self) -> None:
        """Kills the process and what it has started, and waits until it is gone.  One that the server has not forked yet ends by
        itself: nobody writes to its requests any more."""
        with self._reading:
            self._read(0)
            lines = self._told.split()
        if len(lines) == 1:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(lines[0]), signal.SIGKILL)
            self.wait()
        for pipe in (self.requests, self.answers):
            with suppress(BrokenPipeError):
                pipe.close()
        with self._reading:
            if self._life >= 0:
                os.close(self._life)
            self._life = -1

    def _read(self, seconds: float | None) -> None:
        """Takes what the server has written, until it closes the pipe or for so many seconds."""
        while self._life >= 0 and select.select([self._life], [], [], seconds)[0] and (text := os.read(self._life, LARGEST)):
            self._told += text


class ForkServer:
    """Starts a process that imports `module` and forks others, which call `module.main` with their argument and pipes.
    `environment` is added to this process's; `log` gets what the server prints."""

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._environment = environment
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "w") as output:
            self._running = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(os.getpid()), str(theirs.fileno())],
                env={
                    **os.environ,
                    **environment,
                    "PYTHONFAULTHANDLER": "1",
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def fork(self, argument: str, log: Path) -> ForkedProcess:
        """Another process, with this one's environment variables.  It exists as soon as the server has imported everything."""
        path = Path(f"{log}.order")
        path.write_bytes(pickle.dumps(_Order(argument=argument, environment={**os.environ, **self._environment}, log=log)))
        requests, answers, life = os.pipe(), os.pipe(), os.pipe()
        theirs = [requests[0], answers[1], life[1]]
        try:
            with suppress(BrokenPipeError, ConnectionError):  # then `wait` tells that the server ended
                socket.send_fds(self._socket, [os.fsencode(path)], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return ForkedProcess(requests[1], answers[0], life[0])

    def close(self) -> None:
        """Ends the server, and with it what it has forked."""
        end_group(self._running)
        self._running.wait()
        self._socket.close()


# --- in the server ---------------------------------------------------------------------------------------------------

Main = Callable[[str, IO[str], IO[str]], None]
"""Takes the argument, the requests and where its answers go."""


def _serve(module: str, connection: socket.socket) -> None:
    """Forks until the build closes the socket."""
    main: Main = import_module(module).main
    gc.freeze()  # a collection in a forked process would write to these objects, and so copy their pages
    lives: dict[int, int] = {}
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a signal without a handler does not write to `wake`
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            if awake in ready:
                os.read(awake, LARGEST)
                _tell_ended(lives)
            if connection.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 3)
                if not message:
                    return
                requests, answers, life = descriptors
                server = os.getpid()
                number = os.fork()
                if not number:
                    signal.set_wakeup_fd(-1)
                    for descriptor in (awake, wake, life, connection.fileno(), *lives.values()):
                        os.close(descriptor)
                    _work(main, pickle.loads(Path(os.fsdecode(message)).read_bytes()), requests, answers, server)
                with suppress(PermissionError, ProcessLookupError):  # both sides do it: neither can come too late
                    os.setpgid(number, number)
                os.close(requests)
                os.close(answers)
                lives[number] = life
                _tell(life, number)


def _tell_ended(lives: dict[int, int]) -> None:
    while lives:
        number, status = os.waitpid(-1, os.WNOHANG)
        if not number:
            return
        life = lives.pop(number, None)
        if life is not None:
            _tell(life, os.waitstatus_to_exitcode(status))
            os.close(life)


def _tell(life: int, number: int) -> None:
    with suppress(BrokenPipeError):
        os.write(life, b"%d\n" % number)


def _work(main: Main, order: _Order, requests: int, answers: int, server: int) -> NoReturn:
    """The forked process, to its end.  Libraries unload kernels in destructors, when no Python callback may run any more: none
    runs."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent(server)
        sys.stdout = sys.stderr = open(order.log, "w", buffering=1)  # noqa: SIM115 - for the whole process
        os.dup2(sys.stderr.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        os.environ.clear()
        os.environ.update(order.environment)
        main(order.argument, os.fdopen(requests), os.fdopen(answers, "w"))
        status = 0
    except BaseException:  # noqa: BLE001 - it ends the process, and its last line is told
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[3])))
