"""A measured process: `python -m cgcompile.tools.bench.worker WAY JOB [stay]`.

It calls the model with every int_key of the job.  Then it reports the seconds of each phase of its start, the errors of its outputs
against the self-test, and its memory.  With `stay` it then reads requests to time calls, one from each line of standard input:
`call 0`, `dispatch 0` or `device 0`.  The number is the position of an int_key in the job.

WAY is `bundle`, which imports only cgbundle, `eager`, `compile`, `manual` or `ort`.  JOB is a file of `processes.write_job`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from .protocol import STAY, Laps, fail, say

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET = 0.2
"""Approximate seconds that a worker spends on one request."""

FEWEST, MOST = 3, 1000
"""Minimum and maximum number of calls for a request."""

BURST = 4
"""Calls between two synchronizations when dispatch is timed.  The GPU still runs the first call while the CPU launches the last.
With more calls, a baseline that launches every kernel would fill the driver's launch queue (1024 entries), and wait for the GPU."""


class ServedModel(Protocol):
    """A model that can be called.  `key` is the position of an int_key in the job."""

    def call(self, key: int) -> None:
        """Makes one call with inputs in host memory, and waits until its outputs are in host memory."""

    def settle(self, key: int) -> None:
        """Makes calls until this int_key runs at full speed.  The first int_key was called once before."""

    def differs(self, key: int) -> dict[str, Any]:
        """Compares a call with the self-test's outputs: {"errors", "exact"}, see `protocol.difference`."""

    def prepare(self, key: int) -> Callable[[], object]:
        """Returns a call whose inputs and outputs stay on the model's device."""

    def synchronize(self) -> None:
        """Waits for the GPU."""

    def elapsed(self, call: Callable[[], object], count: int) -> float:
        """Returns the seconds of `count` consecutive calls, by the GPU's clock."""

    def about(self) -> dict[str, Any]:
        """Returns further fields of the answer: see `protocol`."""


def main(way: str, path: str, *more: str) -> None:
    """Opens the model and reports its start.  With STAY, then times calls until stdin ends."""
    laps = Laps()
    laps.mark("start")
    sys.excepthook = fail
    import json

    with open(path) as file:
        job = json.load(file)
    served = _open(way, job, laps, bool(more))
    keys = range(len(job["keys"]))
    served.call(0)
    laps.mark("call")
    for key in keys:
        served.settle(key)
    laps.mark("ready")
    report = {"laps": laps.seconds, "memory": resident_bytes(), "torch": "torch" in sys.modules, **served.about()}
    report["errors"] = [served.differs(key) for key in keys] if job["compared"] else []
    say(report)
    if list(more) == [STAY]:
        calls = [served.prepare(key) for key in keys]
        for line in sys.stdin:
            kind, number = line.split()
            say({"seconds": TIMERS[kind](served, calls[int(number)])})


def _open(way: str, job: dict[str, Any], laps: Laps, stays: bool) -> ServedModel:
    if way == "bundle":
        from .bundle_worker import BundleModel

        return BundleModel(job, laps, stays)
    if way == "ort":
        from .ort_worker import OnnxModel

        return OnnxModel(job, laps)
    from .torch_worker import TorchModel

    return TorchModel(way, job, laps)


# --- timing -----------------------------------------------------------------------------------------------------------


def time_calls(served: ServedModel, call: Callable[[], object]) -> float:
    """Returns the median seconds of single calls; freeing the result is not included."""
    from statistics import median

    _seconds_of_each(call, BUDGET / 10, 1)  # warm up: another worker has replaced the contents of the processor's caches
    return median(_seconds_of_each(call, BUDGET))


def time_dispatch(served: ServedModel, call: Callable[[], object]) -> float:
    """Returns the median CPU seconds of single calls, none of which waits for the GPU."""
    from statistics import median
    from time import perf_counter

    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < FEWEST * BURST or (perf_counter() - begin < BUDGET and len(samples) < MOST):
        served.synchronize()
        samples += _seconds_of_each(call, 0.0, BURST)
    served.synchronize()
    return median(samples[BURST:])


def time_device(served: ServedModel, call: Callable[[], object]) -> float:
    """Returns the GPU seconds per call, for consecutive calls."""
    once = served.elapsed(call, FEWEST) / FEWEST
    count = max(FEWEST, min(MOST, int(BUDGET / max(once, 1e-6))))
    return served.elapsed(call, count) / count


TIMERS = {"call": time_calls, "dispatch": time_dispatch, "device": time_device}


def _seconds_of_each(call: Callable[[], object], budget: float, fewest: int = FEWEST) -> list[float]:
    from time import perf_counter

    samples: list[float] = []
    last = perf_counter() + budget
    while len(samples) < fewest or (perf_counter() < last and len(samples) < MOST):
        start = perf_counter()
        result = call()
        samples.append(perf_counter() - start)
        del result
    return samples


def resident_bytes() -> dict[str, int]:
    """Returns bytes of this process in memory: `resident` is all of them, `own` those that are private and were written."""
    with open("/proc/self/smaps_rollup") as file:
        rows = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in file) if "kB" in rest}
    return {"resident": rows["Rss"], "own": rows["Private_Dirty"]}


if __name__ == "__main__":
    main(*sys.argv[1:])
