"""Processes for work before which torch or Triton has to be told something, ahead of its import.  A worker is `python -m MODULE
PARENT`.  It takes pickled requests from standard input, one after the other, and answers each on standard output.  The pickles
carry torch's tensors and our records between two processes of one build, through pipes that no other has.  None is ever kept.

A worker leads a process group, and ends with what it started (ptxas, g++) when its parent stops waiting, or is killed itself.

Forked processes (`side_by_side`) have this one's modules and programs, and import nothing.  libgomp's threads do not survive a
fork, and the thread that had started them would wait for them in vain.  So a forked process works in a thread of its own, which
starts others.  CUDA does not survive one either."""

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
    """How workers are started.  `module` calls `serve`; `folder` takes logs and caches.  `environment` is added to this process's,
    without the variables that `hidden` is true of.  A `reused` worker takes several requests, any other one.  `died`: the code of
    the error when one ends without an answer, in which `title` stands for it."""

    module: str
    folder: Path
    died: str
    title: str = "the process"
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: Callable[[str], object] = lambda name: None
    reused: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`content` is pickled; `what` names it in messages."""

    content: object
    what: str


def ask(
    kind: Kind,
    requests: Mapping[Key, Request],
    workers: int | None = None,
    seconds: float | None = None,
    needed: Collection[Key] = (),
) -> Iterator[tuple[Key, Any]]:
    """The answers as they come, of `workers` processes at a time (default: as many as `processors`).  After `seconds` those to
    `needed` alone are waited for, and the others left out.  Raises what a worker refused, and an error of code `kind.died` when one
    ended without an answer.  The first error ends all."""
    started: list[_Worker] = []
    idle: list[_Worker] = []
    starting = threading.Lock()
    ended = False

    def answer(request: Request) -> Any:
        if idle:
            worker = idle.pop()
        else:
            with starting:  # one that starts while the others are ended would be waited for
                if ended:
                    raise CancelledError
                started.append(worker := _Worker(kind, len(started)))
        reply = worker.ask(request)
        (idle.append if kind.reused else _Worker.close)(worker)
        return reply

    def kill() -> None:
        nonlocal ended
        with starting:
            ended = True
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
        stack.callback(kill)  # before the threads are waited for: then none waits for an answer any more
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        futures = {threads.submit(answer, request): key for key, request in requests.items()}
        left, end = set(futures), None if seconds is None else time.monotonic() + seconds
        while left:
            done, left = wait(left, None if end is None else max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            if not done:  # the time is over
                left, end = {future for future in left if futures[future] in needed}, None
            for future in done:
                yield futures[future], future.result()


def processors() -> int:
    """The processors that this process may use: a container or `taskset` may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0))


class _Worker:
    """A process that was started."""

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
            pass  # closes the pipes, and waits


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kills a process that leads a group, and its group, unless it has been waited for."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # it has not become a leader yet, or ended
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def end_with_parent(parent: int) -> None:
    """In a process that process `parent` started: the kernel kills it when the thread that did ends, however that comes (Linux).
    Ends at once where it came before."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""


def serve(work: Callable[[Any], object]) -> None:
    """In a worker: `work` makes the answer to each request.  An error of ours is a refusal; any other ends the process."""
    end_with_parent(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what torch, Triton and ptxas print goes to the log
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


# --- by a fork -------------------------------------------------------------------------------------------------------

Work = Callable[[Tell], Any]
"""Makes an answer, which is pickled."""


def side_by_side(works: Mapping[Key, Work], tells: Mapping[Key, Tell], logs: Path, died: str) -> dict[Key, Any]:
    """The answers, of as many processes at a time as there are processors.  `logs`: a folder for what they write.  Raises what a
    process refused, and an error of code `died` when one ended without an answer.  The first error ends all."""
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
    ours, theirs = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
        process = os.fork()
    if not process:
        ours.close()
        _run(theirs, work, log, parent)
    theirs.close()
    return ours, process


def _run(connection: Connection, work: Work, log: Path, parent: int) -> NoReturn:
    """The forked process, to its end.  What else `work` raises goes to the log."""
    try:
        os.setsid()  # by its session, all that it starts is known
        end_with_parent(parent)
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 - another thread may have held the locks of the old ones
        os.dup2(sys.stderr.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        gc.freeze()  # what belongs to the build is not finalized here
        threading.excepthook = threading.__excepthook__  # it writes to the log
        sending = threading.Lock()
        thread = threading.Thread(target=_answer, args=(work, partial(_send, connection, sending)))
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _answer(work: Work, send: Callable[[str, object], None]) -> None:
    try:
        send("made", work(partial(send, "told")))
    except BuildError as error:
        send("refused", (error.code, str(error), error.hint))


def _send(connection: Connection, sending: threading.Lock, kind: str, content: object) -> None:
    with sending:
        connection.send_bytes(pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL))


def _death(died: str, process: int, log: Path) -> BuildError:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    killed = ended is not None and ended.si_code != os.CLD_EXITED
    how = f"was killed by {signal.Signals(ended.si_status).name}" if ended and killed else "ended without an answer"
    return BuildError(died, f"a forked process {how}: {lines[-1] if lines else 'it wrote nothing'}")


def _end(connection: Connection, process: int) -> None:
    """Kills a forked process, and what it started and has not waited for."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    while left := [member for member in _session(process) if member != process]:
        for member in left:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        os.sched_yield()
    os.waitpid(process, 0)  # only now: another process could get its number, and a session of that number
    connection.close()


def _session(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    processes = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            state, _, _, session = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                processes.append(int(name))
    return processes
