"""The parent's side of recorder processes: start them, hand them requests, pass their progress on, bring back what they found.

Servers that have imported torch and Inductor fork them (util/fork_server.py).  They start as early as can be, beside this process's
own import of torch.  What one process forks has its addresses, and two recordings with the same addresses prove nothing.  So the
second recorder comes from a server of its own.

Requests and results are pickles, since they hold torch's tensors.  They lie in the build's own scratch folder (mode 0700) and go
with it.  Light: torch is not imported here."""

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
"""Processes of Inductor's that compile for one of ours: a program has a few dozen kernels at most."""

WORKER = "cgcompile.capture.worker.main"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A recorder process that waits for a request or works on one; `log` gets what it says beside progress."""

    name: str
    running: ForkedProcess
    log: Path


class RecorderProcesses:
    """Processes by role.  `folder` holds requests, results and logs, `cache` is what all compilers share.  The second of `servers`
    forks every second recorder."""

    def __init__(self, folder: Path, cache: Path, servers: tuple[ForkServer, ForkServer]) -> None:
        self.folder, self.cache = folder, cache
        self._servers = servers
        self._started: dict[str, list[Process]] = {PRIME: [], RECORD: []}
        self._loading: set[str] = set()
        self._starting = threading.Lock()
        self._stopped = False

    @contextmanager
    def others(self, folder: Path) -> Iterator[RecorderProcesses]:
        """Others of the same servers and cache, which end with this."""
        processes = RecorderProcesses(folder, self.cache, self._servers)
        try:
            yield processes
        finally:
            processes.end(PRIME)
            processes.end(RECORD)

    def start(self, role: str, number: int) -> None:
        """Starts processes until there are `number` of a role.  Raises recorder-failed after `stop`."""
        share = max(1, min(processors() // max(1, number), COMPILERS))
        threads = share if role == PRIME else 1  # recorders take everything from the cache
        with self._starting:
            if self._stopped:
                raise BuildError("recorder-failed", "the recorder processes were stopped")
            while len(self._started[role]) < number:
                self._started[role].append(self._new(role, len(self._started[role]), threads))

    def close(self) -> None:
        """Ends all processes and the servers."""
        self.end(PRIME)
        self.end(RECORD)
        for server in self._servers:
            server.close()

    def stop(self) -> None:
        """Ends all processes for good, whatever another thread waits for: that raises recorder-failed."""
        with self._starting:
            self._stopped = True
            started = [process for some in self._started.values() for process in some]
        for process in started:
            process.running.end()

    def load(self, requests: Sequence[Request]) -> None:
        """Lets processes load the programs of requests, of one role, that `run` takes later."""
        self.start(requests[0].role, len(requests))
        for process, request in zip(self._started[requests[0].role], requests, strict=False):
            self._load(process, request)

    def run(self, requests: Sequence[Request], tell: Tell, at_once: int) -> list[Any]:
        """The results of requests of one role, each by a process of its own, in order.  Raises what a process refused, or
        recorder-failed.  The first failure ends all processes."""
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
        """Ends the processes of a role, and waits until what they held is free."""
        for process in self._started[role]:
            process.running.end()
            self._loading.discard(process.name)
        self._started[role] = []

    def _load(self, process: Process, request: Request) -> None:
        """Lets a process load the program of a request, unless it does already."""
        if process.name not in self._loading:
            self._loading.add(process.name)
            path = self.folder / f"{process.name}.request"
            path.write_bytes(pickle.dumps(request))
            _write(process, path)

    def _answer(self, process: Process, request: Request, tell: Tell) -> Any:
        """What a process makes of a request."""
        self._load(process, request)
        _write(process, "begin")
        for line in _read(process):
            if line == DONE:
                result, refusal = pickle.loads(request.result.read_bytes())
                process.running.end()  # the next one may need the memory that it holds
                if refusal:
                    raise named(*refusal)
                return result
            tell(f"{process.name}: {line.removeprefix('+ ')}")
        status = process.running.wait()
        log = process.log if process.log.exists() else self._servers[0].log
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        how = "ended" if status is None else f"ended with status {status}"
        raise BuildError("recorder-failed", f"a recorder process {how}: {lines[-1] if lines else 'it wrote nothing'} (log: {log})")

    def _new(self, role: str, number: int, compilers: int) -> Process:
        name = f"{role}{number}"
        log = self.folder / f"{name}.log"
        server = self._servers[number % 2 if role == RECORD else 0]
        return Process(name=name, running=server.fork(f"{role} {compilers}", log), log=log)


@contextmanager
def recorder_processes(folder: Path | None = None, cache: Path | None = None) -> Iterator[RecorderProcesses]:
    """Recorder processes, of which the servers are started, with a scratch folder of their own unless there is a `folder`; they end
    with this.  Call it in the thread that lives longest: they end with that, too."""
    with scratch_folder() as scratch:
        place = cache or (folder or scratch) / "cache"
        first, second = [
            ForkServer(WORKER, compiler_environment(place), (folder or scratch) / f"server{number}.log") for number in range(2)
        ]
        processes = RecorderProcesses(folder or scratch, place, (first, second))
        try:
            yield processes
        finally:
            processes.close()


def compiler_environment(folder: Path) -> dict[str, str]:
    """Environment variables that keep every compiler cache inside `folder`, and ask no remote one.  Imports leave CUDA alone."""
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
        "TORCH_WARM_POOL": "0",  # it would start with the first import
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _write(process: Process, line: str | Path) -> None:
    with suppress(BrokenPipeError, ValueError):  # the process ended, or was ended by another thread: reading tells so
        process.running.requests.write(f"{line}\n")
        process.running.requests.flush()


def _read(process: Process) -> Iterator[str]:
    """The lines that a process answers until it ends."""
    with suppress(ValueError):  # it was ended by another thread
        for line in process.running.answers:
            yield line.rstrip()
