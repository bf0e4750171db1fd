"""A server process that imports modules once and forks a process for each task.  Importing torch and Inductor takes 4 to 13
seconds.  The build itself cannot fork after it has started CUDA, which does not survive a fork.

The build sends the path of a pickled `_Order` and three pipes over a Unix socket.  The forked process reads requests from the first
pipe and answers on the second.  The server writes the process id, and later the exit status, to the third.  Each process leads a
process group.  All processes end when the thread that started the server ends."""

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
"""Maximum bytes of a read: more than the longest path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """Describes a process to fork: the `argument` of `main`, the process's `environment`, and the file `log` for its output."""

    argument: str
    environment: dict[str, str]
    log: Path


class ForkedProcess:
    """The build's handle of a forked process.  `requests` and `answers` are the build's ends of its pipes."""

    def __init__(self, requests: int, answers: int, status_pipe: int) -> None:
        self.requests, self.answers = os.fdopen(requests, "w"), os.fdopen(answers)
        self._pipe = status_pipe
        self._text = b""
        self._reading = threading.Lock()

    def wait(self) -> int | None:
        """Waits for the end.  Returns the exit status, negative for a signal, or None if the server ended first."""
        with self._reading:
            self._read(None)
            lines = self._text.split()
        return int(lines[1]) if len(lines) == 2 else None

    def end(self) -> None:
        """Kills the process and its children, and waits for its end.  A process that the server has not forked yet
        ends by itself, because its request pipe is closed."""
        with self._reading:
            self._read(0)
            lines = self._text.split()
        if len(lines) == 1:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(lines[0]), signal.SIGKILL)
            self.wait()
        for pipe in (self.requests, self.answers):
            with suppress(BrokenPipeError):
                pipe.close()
        with self._reading:
            if self._pipe >= 0:
                os.close(self._pipe)
            self._pipe = -1

    def _read(self, seconds: float | None) -> None:
        """Reads what the server writes, until the pipe is closed or `seconds` are over."""
        while self._pipe >= 0 and select.select([self._pipe], [], [], seconds)[0] and (text := os.read(self._pipe, LARGEST)):
            self._text += text


class ForkServer:
    """Starts a process that imports `module` and forks others, which call `module.main` with their argument and pipes.
    `environment` is added to the environment; `log` receives the server's output."""

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._environment = environment
        self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_socket, open(log, "w") as output:
            self._running = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(os.getpid()), str(server_socket.fileno())],
                env={
                    **os.environ,
                    **environment,
                    "PYTHONFAULTHANDLER": "1",
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
                pass_fds=[server_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def fork(self, argument: str, log: Path) -> ForkedProcess:
        """Requests a process with the current environment.  The server forks it after its imports."""
        path = Path(f"{log}.order")
        path.write_bytes(pickle.dumps(_Order(argument=argument, environment={**os.environ, **self._environment}, log=log)))
        requests, answers, status = os.pipe(), os.pipe(), os.pipe()
        server_ends = [requests[0], answers[1], status[1]]
        try:
            with suppress(BrokenPipeError, ConnectionError):  # `wait` then returns None
                socket.send_fds(self._socket, [os.fsencode(path)], server_ends)
        finally:
            for descriptor in server_ends:
                os.close(descriptor)
        return ForkedProcess(requests[1], answers[0], status[0])

    def close(self) -> None:
        """Kills the server and the processes that it forked."""
        end_group(self._running)
        self._running.wait()
        self._socket.close()


# --- in the server ---------------------------------------------------------------------------------------------------

Main = Callable[[str, IO[str], IO[str]], None]
"""Takes the argument, the stream of requests and the stream for answers."""


def _serve(module: str, connection: socket.socket) -> None:
    """Forks processes until the build closes the socket."""
    main: Main = import_module(module).main
    gc.freeze()  # else a collection in a forked process would write to these objects and copy their pages
    status_pipes: dict[int, int] = {}
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda process, frame: None)  # a signal without a handler does not write to `wake`
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            if awake in ready:
                os.read(awake, LARGEST)
                _report_ended(status_pipes)
            if connection.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 3)
                if not message:
                    return
                requests, answers, status_pipe = descriptors
                server = os.getpid()
                process = os.fork()
                if not process:
                    signal.set_wakeup_fd(-1)
                    for descriptor in (awake, wake, status_pipe, connection.fileno(), *status_pipes.values()):
                        os.close(descriptor)
                    _work(main, pickle.loads(Path(os.fsdecode(message)).read_bytes()), requests, answers, server)
                with suppress(PermissionError, ProcessLookupError):  # parent and child both call it, so their order does not matter
                    os.setpgid(process, process)
                os.close(requests)
                os.close(answers)
                status_pipes[process] = status_pipe
                _report(status_pipe, process)


def _report_ended(status_pipes: dict[int, int]) -> None:
    while status_pipes:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        status_pipe = status_pipes.pop(process, None)
        if status_pipe is not None:
            _report(status_pipe, os.waitstatus_to_exitcode(status))
            os.close(status_pipe)


def _report(status_pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):
        os.write(status_pipe, b"%d\n" % number)


def _work(main: Main, order: _Order, requests: int, answers: int, server: int) -> NoReturn:
    """Runs the forked process.  Ends with os._exit: at a normal exit, destructors of libraries unload kernels when no Python
    callback can run."""
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
    except BaseException:  # noqa: BLE001 - ends the process; its last line is reported
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[3])))
