"""Starting workers and reading their answers."""

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
"""The folders that hold cgcompile and cgbundle."""

LONGEST = 300
"""Characters of a reason."""


class WorkerProcess:
    """`python -m MODULE ARGUMENTS`; its standard error goes to `log`.  A context manager that ends it, whatever it is doing.

    It has a session of its own: it ends together with all that it starts (compile workers), and an interrupt of the terminal's
    reaches the parent alone.
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
        """The next answer.  Raises baseline-failed with what the process said when it failed or ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                reply: dict[str, Any] = json.loads(line.removeprefix(MARK))
                if "failed" in reply:
                    raise BuildError("baseline-failed", reply["failed"][:LONGEST], reply["hint"])
                return reply
        raise BuildError("baseline-failed", self._death(self._process.wait()))

    def ask(self, request: str) -> dict[str, Any]:
        """The answer to a line.  Raises as `answer` does."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the answer says how
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
        return self.answer()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(ProcessLookupError):  # it and all that it started have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # a request that it did not read
                    stream.close()

    def _death(self, status: int) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = f": {lines[-1][:LONGEST]}" if lines else ""
        if status == -signal.SIGKILL:
            return f"killed by signal 9, as the system does when memory runs out{said}"
        return f"killed by signal {-status}{said}" if status < 0 else f"ended with exit status {status}{said}"


def write_job(
    folder: str, manifest: Manifest, entry: EntrySpec, keys: Sequence[IntKey], model: str, scratch: Path, threads: int | None = None
) -> Path:
    """The file that tells workers what to serve; `protocol` says what its fields are."""
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
    """Environment variables that keep what torch.compile caches inside `folder`, and ask no remote cache."""
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
    """What every worker inherits: this environment, with the packages of this tree where they are not installed."""
    paths = [*map(os.fspath, PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
