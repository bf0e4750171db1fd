"""What the benchmark and its workers agree on: the clock, the phases of a start, jobs and answers (JSON).

Imports nothing but what every Python has loaded already: what a way to serve needs is paid for, and seen, when it asks for it.

A job (`processes.write_job`):
- `bundle` its folder, `target` "cpu" or "cuda", `entry` its name, `keys` int_keys in order, `call` the manifest's tree;
- `orders` each input's axes from outermost to innermost in memory, `outputs` how many;
- `mutated` positions of inputs that a call changes, `state` whether calls change buffers;
- `calls` from the first state on until the self-test's outputs are given, `compared` whether outputs can be;
- `weights` a file, `model` the user's or "", `train` whether it stays in training mode;
- `threads` of a call on the CPU, null for the number that each has by itself;
- `program` and `onnx` files that are made first.

The answer of a worker that is ready:
- `laps` seconds by phase, `memory` as `worker.resident_bytes`, `torch` whether it is imported;
- `errors` {"error", "exact"} per int_key;
- on a GPU `device`, bytes beside the context; of the bundle `gpu` and `driver`; of torch.compile `hits` of its disk cache.
To a request it answers `seconds`.  A process that fails answers `failed` and `hint`.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgbundle.format.safetensors import Mapped

SPAWNED = "CGCOMPILE_BENCH_SPAWNED"
"""Environment variable: when this process was started, in seconds of the monotonic clock, which all processes share."""

MARK = "@cgcompile.tools.bench "
"""Starts a line of a worker's standard output that is an answer; the user's model prints the others."""

STAY = "stay"
"""Last argument of a worker that goes on to time calls when it is told to."""

PHASES = ("start", "import", "load", "call", "ready")
"""From process start on: the interpreter; imports; weights and everything else before a call; the first call; what is left
until every int_key is served at full speed.  Inputs and outputs of the first call are in host memory."""


def now() -> float:
    """Seconds on the clock that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Laps:
    """Seconds of each phase since this process was started, in order."""

    def __init__(self, started: float | None = None) -> None:
        self._last = float(os.environ[SPAWNED]) if started is None else started
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Ends the phase `name` now."""
        moment = now()
        self.seconds[name] = self.seconds.get(name, 0.0) + moment - self._last
        self._last = moment

    def skip(self) -> None:
        """What happened since the last mark was the benchmark's own and counts nowhere."""
        self._last = now()


def difference(self_test: Mapped, tensors: Iterable[tuple[str, str, bytes]]) -> dict[str, Any]:
    """{"errors", "exact"} of a worker that has no PyTorch.

    `tensors` holds (name in the self-test, dtype, contents) of every output, then of every input that the call writes to.
    """
    rows = [beside_stored(self_test, *row) for row in tensors]
    return {"errors": [error for error, _ in rows], "exact": all(exact for _, exact in rows)}


def beside_stored(self_test: Mapped, name: str, dtype: str, got: bytes) -> tuple[float, bool]:
    """(error, whether the bits are equal) of a tensor beside the self-test's, which may be condensed."""
    from cgbundle.tensors import comparison

    if comparison.stand_in(self_test.entries, name):
        error, text = comparison.compare_stored(self_test, name, dtype, got)
        return error, not text
    expected = bytes(self_test.data(name))
    return (0.0, True) if expected == got else (comparison.difference(dtype, expected, got), False)


def say(answer: dict[str, Any]) -> None:
    """Writes a line that `processes.WorkerProcess` reads."""
    import json

    print(MARK + json.dumps(answer), flush=True)


def reason(kind: type[BaseException], error: BaseException) -> str:
    """`OutOfMemoryError: CUDA out of memory.`: the kind, and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([kind.__name__, *lines[:1]])


def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The sys.excepthook of a worker: answers what failed."""
    say({"failed": reason(kind, error), "hint": getattr(error, "hint", "")})
    sys.__excepthook__(kind, error, trace)
