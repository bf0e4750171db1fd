"""What parent and child processes agree on: the clock, the phases of a start, and how a child speaks.

Imports nothing but what every Python has loaded already: what a peer needs must be paid for, and seen, when the peer asks for it.
"""

from __future__ import annotations

import os
import time

SPAWNED = "CGCOMPILE_BENCH_SPAWNED"
"""Environment variable: when the parent started this process, in seconds of the monotonic clock, which all processes share."""

MARK = "@cgcompile.tools.bench "
"""Starts a line of a child's standard output that is an answer; every other line is the user's model talking."""

STAY = "stay"
"""Last argument of a child that goes on to time calls when it is told to."""

PHASES = ("start", "import", "load", "call", "ready")
"""Stretches from process start on: the interpreter; imports; weights and everything else before a call; the first call, inputs and
outputs in host memory; what is left until every int_key is served at full speed."""


def now() -> float:
    """Seconds on the clock that parent and child share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Laps:
    """Seconds of each stretch since the parent started this process, in order."""

    def __init__(self, started: float | None = None) -> None:
        self._last = float(os.environ[SPAWNED]) if started is None else started
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Ends the stretch `name` now."""
        moment = now()
        self.seconds[name] = self.seconds.get(name, 0.0) + moment - self._last
        self._last = moment

    def skip(self) -> None:
        """What happened since the last mark was the benchmark's own and counts nowhere."""
        self._last = now()
