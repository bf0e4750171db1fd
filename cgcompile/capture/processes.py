"""The parent's side of recorder processes: starts them, sends requests, reports their progress, and reads their results.

Fork servers that have imported torch and Inductor fork them (util/fork_server.py).  The servers start while this process still
imports torch.  Forked processes have the same addresses as their server.  Two recordings with equal addresses cannot show which
words are addresses, so the second recorder is forked by a second server.

Requests and results are pickles, because they hold torch tensors.  They are files in the build's scratch folder (mode 0700), and
are deleted with it.  This module does not import torch."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError, named
from ..util.fork_server import ForkedProcess, ForkServer
from ..util.progress import Tell
from ..util.scratch import scratch_folder
from ..util.workers import processors
from .request import DONE, PRIME, RECORD, Request

COMPILERS = 8
"""Most Inductor compile processes for each recorder process: a program has a few dozen kernels at most."""

WORKER = "cgcompile.capture.worker.main"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A recorder process that waits for a request or works on one.  `log` receives its stdout and stderr."""

    name: str
    running: ForkedProcess
    log: Path


class RecorderProcesses:
    """Recorder processes by role.  `folder` holds requests and logs; `cache` is the compile cache that all processes share.
    The second of `servers` forks every second recorder (role RECORD), the first forks all other processes."""

    def __init__(self, folder: Path, cache: Path, servers: tuple[ForkServer, ForkServer]) -> None:
        self.folder, self.cache = folder, cache
        self._servers = servers
        self._started: dict[str, list[Process]] = {PRIME: [], RECORD: []}
        self._loading: set[str] = set()
        self._starting = threading.Lock()
        self._stopped = False

    @contextmanager
    def others(self, folder: Path) -> Iterator[RecorderProcesses]:
        """Yields separate processes from the same servers and cache, and ends them on exit.  `folder`: for requests and logs."""
        processes = RecorderProcesses(folder, self.cache, self._servers)
        try:
            yield processes
        finally:
            processes.end(PRIME)
            processes.end(RECORD)

    def start(self, role: str, number: int) -> None:
        """Starts processes of a role until `number` of them run.  Raises recorder-failed after `stop`."""
        share = max(1, min(processors() // max(1, number), COMPILERS))
        compilers = share if role == PRIME else 1  # recorders find all kernels in the compile cache
        with self._starting:
            if self._stopped:
                raise BuildError("recorder-failed", "the recorder processes were stopped")
            while len(self._started[role]) < number:
                self._started[role].append(self._new(role, len(self._started[role]), compilers))

    def close(self) -> None:
        """Ends all processes and the servers."""
        self.end(PRIME)
        self.end(RECORD)
        for server in self._servers:
            server.close()

    def stop(self) -> None:
        """Ends all processes, and prevents new ones.  A thread that waits in `run` raises recorder-failed."""
        with self._starting:
            self._stopped = True
            started = [process for processes in self._started.values() for process in processes]
        for process in started:
            process.running.end()

    def load(self, requests: Sequence[Request]) -> None:
        """Starts loading the programs of requests of one role, before `run` is called with the same requests."""
        self.start(requests[0].role, len(requests))
        for process, request in zip(self._started[requests[0].role], requests, strict=False):
            self._load(process, request)

    def run(self, requests: Sequence[Request], tell: Tell, at_once: int) -> list[Any]:
        """Runs each request of one role in its own process, `at_once` at a time, and returns the results in order.  Raises the
        error that a process reports, or recorder-failed.  The first failure ends all processes."""
        role = requests[0].role
        self.start(role, len(requests))
        with ThreadPoolExecutor(at_once) as threads:
            futures = [
                threads.submit(self._answer, process, request, tell)
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
        """Ends the processes of a role, and waits until their memory is free."""
        for process in self._started[role]:
            process.running.end()
            self._loading.discard(process.name)
        self._started[role] = []

    def _load(self, process: Process, request: Request) -> None:
        """Sends a process the request whose program it loads, unless it already has a request."""
        if process.name not in self._loading:
            self._loading.add(process.name)
            path = self.folder / f"{process.name}.request"
            path.write_bytes(pickle.dumps(request))
            _write(process, path)

    def _answer(self, process: Process, request: Request, tell: Tell) -> Any:
        """Runs a request in a process and returns the result.  Raises the reported error, or recorder-failed if it dies."""
        self._load(process, request)
        _write(process, "begin")
        for line in _read(process):
            if line == DONE:
                result, refusal = pickle.loads(request.result.read_bytes())
                process.running.end()  # the next process may need its GPU memory
                if refusal:
                    raise named(*refusal)
                return result
            tell(f"{process.name}: {line.removeprefix('+ ')}")
        status = process.running.wait()
        log = process.log if process.log.exists() else self._servers[0].log
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        end = "ended" if status is None else f"ended with status {status}"
        raise BuildError("recorder-failed", f"a recorder process {end}: {lines[-1] if lines else 'it wrote nothing'} (log: {log})")

    def _new(self, role: str, number: int, compilers: int) -> Process:
        name = f"{role}{number}"
        log = self.folder / f"{name}.log"
        server = self._servers[number % 2 if role == RECORD else 0]
        return Process(name=name, running=server.fork(f"{role} {compilers}", log), log=log)


@contextmanager
def recorder_processes(folder: Path | None = None, cache: Path | None = None) -> Iterator[RecorderProcesses]:
    """Starts the two fork servers, and ends all processes on exit.  `folder`: for requests and logs (default: a scratch folder).
    Call it in a thread that ends after the build: the processes also end when that thread ends."""
    with scratch_folder() as scratch:
        cache_folder = cache or (folder or scratch) / "cache"
        first, second = [
            ForkServer(WORKER, compiler_environment(cache_folder), (folder or scratch) / f"server{number}.log")
            for number in range(2)
        ]
        processes = RecorderProcesses(folder or scratch, cache_folder, (first, second))
        try:
            yield processes
        finally:
            processes.close()


def compiler_environment(folder: Path) -> dict[str, str]:
    """Returns environment variables that keep all compiler caches in `folder`, disable remote caches, and keep CUDA from starting
    early."""
    folder = folder.absolute()
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder / "inductor"),
        "TRITON_CACHE_DIR": os.fspath(folder / "triton"),
        "CUDA_CACHE_PATH": os.fspath(folder / "driver"),
        "TRITON_DISABLE_LINE_INFO": "1",  # images hold no paths of the build, and are smaller
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_WORKER_START": "fork",
        "TORCH_WARM_POOL": "0",  # Inductor would start its pool at import
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _write(process: Process, line: str | Path) -> None:
    with suppress(BrokenPipeError, ValueError):  # the process ended, or another thread ended it: `_answer` reports that
        process.running.requests.write(f"{line}\n")
        process.running.requests.flush()


def _read(process: Process) -> Iterator[str]:
    """Yields the lines of a process's answers until it ends."""
    with suppress(ValueError):  # another thread ended it
        for line in process.running.answers:
            yield line.rstrip()
