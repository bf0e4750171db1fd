"""Work done side by side in processes that are forked from this one: they have its modules and its programs, and import nothing.

libgomp's threads do not survive a fork, and the thread that had started them would wait for them in vain.  So a forked process
works in a thread of its own, which starts others.  CUDA does not survive one either.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from ..errors import BuildError, named
from .progress import Tell
from .workers import end_with_parent, processors

Key = TypeVar("Key", bound=Hashable)

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
            for ready in wait(list(running)):
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
    while left := [each for each in _session(process) if each != process]:
        for each in left:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        os.sched_yield()
    os.waitpid(process, 0)  # only now: another process could get its number, and a session of that number
    connection.close()


def _session(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            state, _, _, session = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(name))
    return found
