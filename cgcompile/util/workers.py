"""Worker processes, for work that needs environment variables set before torch or Triton is imported.  A worker is `python -m
MODULE PARENT`, with its parent's process id.  It reads pickled requests from standard input and writes each answer to standard
output.  Pickle is safe here: the pipes connect two processes of one build, and nothing is stored.

A worker leads a process group.  The worker and its children (ptxas, g++) end when the parent no longer waits for it or is killed.

Forked processes (`run_forked`) share this process's modules and programs and import nothing.  libgomp's threads do not survive a
fork, and the thread that started them would wait forever.  So a forked process works in a new thread, which starts new threads of
libgomp.  CUDA does not survive a fork either."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from ..errors import BuildError, named
from .progress import Tell

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How workers are started.  `module` calls `serve`; `folder` gets logs and caches.  `environment` is added to this process's,
    without the variables for which `hidden` is true.  A worker takes several requests if `reused`, else one.  `died` is the code of
    the error if a worker ends without an answer, and `title` names the worker in this error."""

    module: str
    folder: Path
    died: str
    title: str = "the process"
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: Callable[[str], object] = lambda name: None
    reused: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`content` is pickled; `what` describes it in messages."""

    content: object
    what: str


def ask(
    kind: Kind,
    requests: Mapping[Key, Request],
    workers: int | None = None,
    seconds: float | None = None,
    needed: Collection[Key] = (),
) -> Iterator[tuple[Key, Any]]:
    """Yields the answers as they arrive, from `workers` processes (default: `processors()`).  After `seconds`, only the answers to
    `needed` are awaited and the others are dropped.  Raises a worker's BuildError, and an error of code `kind.died` if a worker
    ends without an answer.  The first error ends all workers."""
    started: list[_Worker] = []
    idle: list[_Worker] = []
    start_lock = threading.Lock()
    stopped = False

    def answer(request: Request) -> Any:
        if idle:
            worker = idle.pop()
        else:
            with start_lock:  # else a worker that starts during `kill` would not be killed
                if stopped:
                    raise CancelledError
                started.append(worker := _Worker(kind, len(started)))
        reply = worker.ask(request)
        (idle.append if kind.reused else _Worker.close)(worker)
        return reply

    def kill() -> None:
        nonlocal stopped
        with start_lock:
            stopped = True
        for worker in started:
            worker.kill()

    def close() -> None:
        for worker in started:
            worker.close()

    if not requests:
        return
    with ExitStack() as stack:
        stack.callback(close)
        threads = stack.enter_context(ThreadPoolExecutor(min(workers or processors(), len(requests))))
        stack.callback(kill)  # runs before the threads are joined, so that none waits for an answer
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        futures = {threads.submit(answer, request): key for key, request in requests.items()}
        pending, end = set(futures), None if seconds is None else time.monotonic() + seconds
        while pending:
            done, pending = wait(pending, None if end is None else max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            if not done:  # timeout
                pending, end = {future for future in pending if futures[future] in needed}, None
            for future in done:
                yield futures[future], future.result()


def processors() -> int:
    """Returns the number of processors that this process may use; a container or `taskset` may limit it."""
    return len(os.sched_getaffinity(0))


class _Worker:
    """A running worker process."""

    def __init__(self, kind: Kind, number: int) -> None:
        self.kind = kind
        name = f"{kind.module.split('.')[-2:][0]}{number}"
        self.log = kind.folder / f"{name}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", kind.module, str(os.getpid())],
                env={
                    **{name: value for name, value in os.environ.items() if not kind.hidden(name)},
                    "CUDA_VISIBLE_DEVICES": "",
                    "TORCHINDUCTOR_CACHE_DIR": os.fspath(kind.folder / f"{name}.cache"),
                    "PYTHONFAULTHANDLER": "1",
                    "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path),
                    **kind.environment,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )

    def kill(self) -> None:
        end_group(self.process)

    def ask(self, request: Request) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump(request.content, self.process.stdin)
            self.process.stdin.flush()
            reply, refusal = pickle.load(self.process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            status = self.process.wait()
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            last = lines[-1] if lines else "it wrote nothing"
            raise BuildError(self.kind.died, f"{request.what}: {self.kind.title} ended with status {status}: {last}") from error
        if refusal:
            raise named(*refusal)
        return reply

    def close(self) -> None:
        self.kill()
        with suppress(BrokenPipeError), self.process:
            pass  # closes the pipes and waits for the process


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kills a process and the group that it leads, unless the process was already waited for."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # it does not lead a group yet, or has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process, a child of `parent`, when the thread of `parent` that started it ends (Linux).  Exits at
    once if the parent has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def serve(work: Callable[[Any], object]) -> None:
    """Runs a worker: answers each request with the result of `work`.  A BuildError is sent as the answer.  Other errors end the
    process."""
    end_with_parent(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of torch, Triton and ptxas goes to the log
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        reply, refusal = None, None
        try:
            reply = work(request)
        except BuildError as error:
            refusal = error.code, str(error), error.hint
        pickle.dump((reply, refusal), answers)
        answers.flush()


# --- forked processes ------------------------------------------------------------------------------------------------

Work = Callable[[Tell], Any]
"""Returns an answer, which is pickled."""


def run_forked(works: Mapping[Key, Work], tells: Mapping[Key, Tell], logs: Path, died: str) -> dict[Key, Any]:
    """Returns the answers of forked processes; as many run at a time as there are processors.  `logs` is the folder for their
    output.  Raises a process's BuildError, and an error of code `died` if a process ends without an answer.  The first error ends
    all processes."""
    waiting, running, answers = list(works), dict[Connection, tuple[Key, int, Path]](), dict[Key, Any]()
    try:
        while waiting or running:
            while waiting and len(running) < processors():
                key = waiting.pop(0)
                log = logs / f"fork{len(works) - len(waiting)}.log"
                connection, process = _fork(works[key], log)
                running[connection] = key, process, log
            for ready in wait_for(list(running)):
                connection = cast(Connection, ready)
                key, process, log = running[connection]
                try:
                    kind, content = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    raise _death(died, process, log) from None
                if kind == "told":
                    tells[key](content)
                elif kind == "refused":
                    raise named(*content)
                else:
                    answers[key] = content
                    del running[connection]
                    _end(connection, process)
    finally:
        for connection, (_, process, _) in running.items():
            _end(connection, process)
    return {key: answers[key] for key in works}


def _fork(work: Work, log: Path) -> tuple[Connection, int]:
    receiver, sender = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if a process with threads forks
        process = os.fork()
    if not process:
        receiver.close()
        _run(sender, work, log, parent)
    sender.close()
    return receiver, process


def _run(connection: Connection, work: Work, log: Path, parent: int) -> NoReturn:
    """Runs the forked process.  Errors of `work` other than BuildError go to the log."""
    try:
        os.setsid()  # `_end` finds the children of this process by its session
        end_with_parent(parent)
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 - a thread of the parent may have held the old lock
        os.dup2(sys.stderr.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        gc.freeze()  # do not finalize the build's objects
        threading.excepthook = threading.__excepthook__  # the default hook, which writes to the log
        lock = threading.Lock()
        thread = threading.Thread(target=_answer, args=(work, partial(_send, connection, lock)))
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _answer(work: Work, send: Callable[[str, object], None]) -> None:
    try:
        send("made", work(partial(send, "told")))
    except BuildError as error:
        send("refused", (error.code, str(error), error.hint))


def _send(connection: Connection, lock: threading.Lock, kind: str, content: object) -> None:
    with lock:
        connection.send_bytes(pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL))


def _death(died: str, process: int, log: Path) -> BuildError:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    killed = ended is not None and ended.si_code != os.CLD_EXITED
    cause = f"was killed by {signal.Signals(ended.si_status).name}" if ended and killed else "ended without an answer"
    return BuildError(died, f"a forked process {cause}: {lines[-1] if lines else 'it wrote nothing'}")


def _end(connection: Connection, process: int) -> None:
    """Kills a forked process and its children that it has not waited for."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    while children := [member for member in _session(process) if member != process]:
        for member in children:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        os.sched_yield()
    os.waitpid(process, 0)  # last: until then, no other process or session can get this id
    connection.close()


def _session(leader: int) -> list[int]:
    """Returns the processes of a session that have not ended."""
    processes = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            state, _, _, session = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                processes.append(int(name))
    return processes
