"""The protocol between the benchmark and its workers: clock, phases of a start, jobs and answers (JSON).

Imports only modules that Python has already loaded, so that it adds nothing to the measured imports of a worker.

A job (`processes.write_job`):
- `bundle` its folder, `target` "cpu" or "cuda", `entry` its name, `keys` int_keys in order, `call` the manifest's tree;
- `orders` each input's axes from outermost to innermost in memory, `outputs` the number of outputs;
- `mutated` positions of inputs that a call changes, `state` whether calls change buffers;
- `calls` the number of calls from the initial state to the outputs of the self-test, `compared` whether outputs can be compared;
- `weights` a file, `model` the user's model or "", `train` whether it stays in training mode;
- `threads` of a call on the CPU, null for the default;
- `program` and `onnx` the files that `export_program` writes first.

The answer of a worker that is ready:
- `laps` seconds by phase, `memory` as `worker.resident_bytes`, `torch` whether it is imported;
- `errors` {"errors", "exact"} per int_key;
- on a GPU `device`, bytes in addition to the context; from the bundle `gpu` and `driver`; from torch.compile the `hits` in its disk
  cache.
The answer to a request is `seconds`.  A process that fails answers `failed` and `hint`.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgbundle.format.safetensors_files import Mapped

SPAWNED = "CGCOMPILE_BENCH_SPAWNED"
"""Environment variable: the start time of the process, in seconds of the monotonic clock, which all processes share."""

MARK = "@cgcompile.tools.bench "
"""Prefix of a line of standard output that is an answer.  Other lines come from the user's model."""

STAY = "stay"
"""The last argument of a worker that stays after its start, to time calls on request."""

PHASES = ("start", "import", "load", "call", "ready")
"""From process start: the interpreter; imports; weights and other work before a call; the first call; further calls until every
int_key runs at full speed.  Inputs and outputs of the first call are in host memory."""


def now() -> float:
    """Returns seconds of the clock that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Laps:
    """Measures the seconds of each phase since the start of this process."""

    def __init__(self, started: float | None = None) -> None:
        self._last = float(os.environ[SPAWNED]) if started is None else started
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Ends the phase `name`."""
        moment = now()
        self.seconds[name] = self.seconds.get(name, 0.0) + moment - self._last
        self._last = moment

    def skip(self) -> None:
        """Excludes the time since the last mark from all phases."""
        self._last = now()


def difference(self_test: Mapped, tensors: Iterable[tuple[str, str, bytes]]) -> dict[str, Any]:
    """Returns {"errors", "exact"} for a worker without PyTorch.

    `tensors`: (name in the self-test, dtype, contents) of every output, then of every input that the call writes to.
    """
    rows = [beside_stored(self_test, *row) for row in tensors]
    return {"errors": [error for error, _ in rows], "exact": all(exact for _, exact in rows)}


def beside_stored(self_test: Mapped, name: str, dtype: str, got: bytes) -> tuple[float, bool]:
    """Returns (error, bitwise equal) of a tensor against that of the self-test, which may be stored as hashes and samples."""
    from cgbundle.tensors import comparison

    if comparison.stand_in(self_test.entries, name):
        error, text = comparison.compare_stored(self_test, name, dtype, got)
        return error, not text
    expected = bytes(self_test.data(name))
    return (0.0, True) if expected == got else (comparison.difference(dtype, expected, got), False)


def say(answer: dict[str, Any]) -> None:
    """Writes a line for `processes.WorkerProcess`."""
    import json

    print(MARK + json.dumps(answer), flush=True)


def reason(kind: type[BaseException], error: BaseException) -> str:
    """Returns the class of an error and its first line: `OutOfMemoryError: CUDA out of memory.`"""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([kind.__name__, *lines[:1]])


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The sys.excepthook of a worker: answers with the error."""
    say({"failed": reason(kind, error), "hint": getattr(error, "hint", "")})
    sys.__excepthook__(kind, error, trace)
