"""The parent's side of recorder processes: start them, pass their progress on, bring back what they found or refused.

Requests and results are pickles, since they hold torch's tensors.  They lie in the build's own scratch folder (mode 0700) and go
with it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import BuildError, named
from ..util.progress import Tell
from ..util.workers import end_group
from .request import PREFIX, REFUSED, Request


def run_all(requests: Sequence[Request], folder: Path, environment: Mapping[str, str], workers: int, tell: Tell) -> list[Any]:
    """Run recorder processes, at most `workers` at a time, and return their results in order.  A failure ends the others.  Raises
    what a process refused, or recorder-failed."""
    running: list[subprocess.Popen[str]] = []
    starting = threading.Lock()
    ended = False

    def one(number: int) -> Any:
        name = f"{requests[number].role}{number}"
        path = folder / f"{name}.request"
        path.write_bytes(pickle.dumps(requests[number]))
        with open(folder / f"{name}.log", "w") as log:
            with starting:  # one that starts while the others are ended would be waited for
                if ended:
                    raise CancelledError
                process = subprocess.Popen(
                    [sys.executable, "-m", "cgcompile.capture.worker.main", os.fspath(path), str(os.getpid())],
                    env={
                        **os.environ,
                        **environment,
                        "PYTHONFAULTHANDLER": "1",
                        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    process_group=0,
                )
                running.append(process)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(PREFIX):
                    tell(f"{name}: {line.removeprefix(PREFIX).strip()}")
                else:
                    log.write(line)
            return _result(requests[number], process.wait(), folder / f"{name}.log")

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, number) for number in range(len(requests))]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            with starting:
                ended = True
            for process in running:
                end_group(process)


def _result(request: Request, status: int, log: Path) -> Any:
    if status == 0:
        return pickle.loads(request.result.read_bytes())
    if status == REFUSED:
        raise named(*pickle.loads(request.result.read_bytes()))
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it wrote nothing"
    raise BuildError("recorder-failed", f"a recorder process ended with status {status}: {last} (log: {log})")
