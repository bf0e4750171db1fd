"""The parent's side of recorder processes: start them, hand them requests, pass their progress on, bring back what they found.

They start early, while the model is exported: importing torch and making the GPU's context take seconds.  Requests and results are
pickles, since they hold torch's tensors.  They lie in the build's own scratch folder (mode 0700) and go with it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError, named
from ..targets.cuda.lowering import cache_environment
from ..util.progress import Tell
from ..util.scratch import scratch_folder
from ..util.workers import end_group, processors
from .request import DONE, PRIME, RECORD, Request

COMPILERS = 8
"""Processes of Inductor's that compile for one of ours: a program has a few dozen kernels at most.  The first costs as much as ours
does (importing torch and Triton, 5 s of a slow processor); each one more is forked from it and costs 40 ms, and memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A recorder process that waits for a request or works on one; `log` gets what it says beside progress."""

    name: str
    running: subprocess.Popen[str]
    log: Path


class RecorderProcesses:
    """Processes by role.  `folder` holds requests, results, logs and, by default, the `cache` that all compilers share."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder, self.cache = folder, cache or folder / "cache"
        self._environment = cache_environment(self.cache)
        self._started: dict[str, list[Process]] = {PRIME: [], RECORD: []}
        self._starting = threading.Lock()
        self._stopped = False

    def start(self, role: str, number: int) -> None:
        """Starts processes until there are `number` of a role.  Call it in the thread that lives longest: they end with it.  Raises
        recorder-failed after `stop`."""
        share = max(1, min(processors() // max(1, number), COMPILERS))
        threads = share if role == PRIME else 1  # recorders take everything from the cache
        with self._starting:
            if self._stopped:
                raise BuildError("recorder-failed", "the recorder processes were stopped")
            while len(self._started[role]) < number:
                self._started[role].append(self._new(role, len(self._started[role]), threads))

    def stop(self) -> None:
        """Ends all processes for good, whatever another thread waits for: that raises recorder-failed."""
        with self._starting:
            self._stopped = True
            started = [process for some in self._started.values() for process in some]
        for process in started:
            end_group(process.running)

    def run(self, requests: Sequence[Request], tell: Tell, at_once: int) -> list[Any]:
        """The results of requests of one role, each by a process of its own, in order.  Raises what a process refused, or
        recorder-failed.  The first failure ends all processes."""
        role = requests[0].role
        self.start(role, len(requests))
        with ThreadPoolExecutor(at_once) as threads:
            futures = [
                threads.submit(_answer, process, request, self.folder, tell)
                for process, request in zip(self._started[role], requests, strict=False)
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self.end(PRIME)
                self.end(RECORD)
                raise
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def end(self, role: str) -> None:
        """Ends the processes of a role, and waits until what they held is free."""
        for process in self._started[role]:
            end_group(process.running)
        for process in self._started[role]:
            process.running.wait()
        self._started[role] = []

    def _new(self, role: str, number: int, threads: int) -> Process:
        name = f"{role}{number}"
        path = self.folder / f"{name}.log"
        with open(path, "w") as log:
            running = subprocess.Popen(
                [sys.executable, "-m", "cgcompile.capture.worker.main", role, str(os.getpid())],
                env={
                    "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
                    **os.environ,
                    **self._environment,
                    "PYTHONFAULTHANDLER": "1",
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
        return Process(name=name, running=running, log=path)


@contextmanager
def recorder_processes(folder: Path | None = None, cache: Path | None = None) -> Iterator[RecorderProcesses]:
    """Recorder processes, none started yet, with a scratch folder of their own unless there is a `folder`; they end with this."""
    with scratch_folder() as scratch:
        processes = RecorderProcesses(folder or scratch, cache)
        try:
            yield processes
        finally:
            processes.end(PRIME)
            processes.end(RECORD)


def _answer(process: Process, request: Request, folder: Path, tell: Tell) -> Any:
    """What a process makes of a request."""
    path = folder / f"{process.name}.request"
    path.write_bytes(pickle.dumps(request))
    given, said = process.running.stdin, process.running.stdout
    assert given is not None and said is not None
    with suppress(BrokenPipeError):
        given.write(f"{path}\n")
        given.flush()
        for line in said:
            if line.rstrip("\n") == DONE:
                found, refusal = pickle.loads(request.result.read_bytes())
                end_group(process.running)  # the next one may need the memory that it holds
                process.running.wait()
                if refusal:
                    raise named(*refusal)
                return found
            tell(f"{process.name}: {line.removeprefix('+ ').rstrip()}")
    status = process.running.wait()
    lines = [line.strip() for line in process.log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it wrote nothing"
    raise BuildError("recorder-failed", f"a recorder process ended with status {status}: {last} (log: {process.log})")
