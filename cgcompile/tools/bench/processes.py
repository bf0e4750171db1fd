"""Starts workers and reads their answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import cgbundle
from cgbundle.format import file_names
from cgbundle.format.schema import EntrySpec, IntKey, Manifest

from ...errors import BuildError
from .protocol import MARK, SPAWNED, now

PACKAGES = (Path(__file__).resolve().parents[3], Path(cgbundle.__file__).resolve().parents[1])
"""The folders that contain cgcompile and cgbundle."""

LONGEST = 300
"""Maximum characters of a reason."""


class WorkerProcess:
    """Runs `python -m MODULE ARGUMENTS` with standard error in `log`.  The context manager kills the process at the end.

    The process leads a new session.  So its children (compile workers) are killed with it, and Ctrl-C in the terminal interrupts
    only the parent.
    """

    def __init__(self, module: str, *arguments: object, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                env={**_environment(), **(environment or {}), SPAWNED: repr(now())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )

    def answer(self) -> dict[str, Any]:
        """Returns the next answer.  Raises baseline-failed with the reason if the process failed or ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                reply: dict[str, Any] = json.loads(line.removeprefix(MARK))
                if "failed" in reply:
                    raise BuildError("baseline-failed", reply["failed"][:LONGEST], reply["hint"])
                return reply
        raise BuildError("baseline-failed", self._death(self._process.wait()))

    def ask(self, request: str) -> dict[str, Any]:
        """Sends a line and returns the answer.  Raises as `answer` does."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; `answer` raises the reason
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
        return self.answer()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(ProcessLookupError):  # the session has already ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # the process did not read a request
                    stream.close()

    def _death(self, status: int) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last_line = f": {lines[-1][:LONGEST]}" if lines else ""
        if status == -signal.SIGKILL:
            return f"killed by signal 9, as the system does when memory runs out{last_line}"
        return f"killed by signal {-status}{last_line}" if status < 0 else f"ended with exit status {status}{last_line}"


def write_job(
    folder: str, manifest: Manifest, entry: EntrySpec, keys: Sequence[IntKey], model: str, scratch: Path, threads: int | None = None
) -> Path:
    """Writes the job file for workers; `protocol` describes its fields."""
    job = {
        "bundle": folder,
        "target": manifest.target.kind,
        "entry": entry.name,
        "keys": keys,
        "orders": [spec.order for spec in entry.inputs],
        "outputs": len(entry.outputs),
        "mutated": entry.mutated_inputs,
        "call": entry.call["call"],
        "calls": entry.self_test.calls,
        "state": any(weight.memory == "state" for weight in manifest.weights),
        "compared": manifest.random is None and not entry.data_sizes,
        "weights": os.path.join(folder, file_names.WEIGHTS),
        "model": os.path.abspath(model) if os.path.exists(model) else model,
        "threads": threads,
        "train": ("train", "true") in manifest.provenance.options,
        "program": os.fspath(scratch / "cgcompile_bench_program.py"),
        "onnx": os.fspath(scratch / "program.onnx"),
    }
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    return path


def compiler_cache(folder: Path) -> dict[str, str]:
    """Returns environment variables that put the caches of torch.compile into `folder` and disable remote caches."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder / "inductor"),
        "TRITON_CACHE_DIR": os.fspath(folder / "triton"),
        "CUDA_CACHE_PATH": os.fspath(folder / "driver"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    }


def _environment() -> dict[str, str]:
    """Returns the environment of every worker: this one, with the packages of this source tree in PYTHONPATH."""
    paths = [*map(os.fspath, PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
