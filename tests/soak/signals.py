"""`python -m tests.soak.signals --count 10000`: sends signals at random moments of CPU calls; the handler raises.

The caller must get each exception exactly once. Every call that ends must be right, including the call after an interrupted one.
Closing a program must end, even if a signal interrupts it. A hang ends the program with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGALRM,))  # block the signal in library threads: only this thread gets it

import numpy  # noqa: E402
import torch  # noqa: E402

import cgbundle  # noqa: E402
from cgbundle.call import outputs  # noqa: E402
from tests.helpers.places import GOLDEN  # noqa: E402

HANG = 60
"""Seconds after which the program counts as deadlocked."""

ROUND = 250
"""Number of signals for one loaded program."""


class Interrupt(BaseException):
    """The exception that the handler raises."""


class Signals:
    """Sends SIGALRM after some microseconds. `sent` counts how often the handler has raised."""

    def __init__(self) -> None:
        self.sent, self._armed = 0, False
        signal.signal(signal.SIGALRM, self._raise)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))

    def _raise(self, number: int, frame: object) -> None:
        if self._armed:  # a signal may arrive after its timer was stopped
            self._armed = False
            self.sent += 1
            raise Interrupt

    def during(self, act: Callable[[], Any], microseconds: float) -> tuple[bool, Any]:
        """Returns whether `act` ended before the signal, and its result."""
        before = self.sent
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, microseconds * 1e-6)
            result = act()
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            assert self.sent == before + 1, "an interrupt was lost"
            return False, None
        assert self.sent == before, "an interrupt was lost"
        return True, result


class Case:
    """A golden bundle, the kind of tensors that its calls take, and the options of its load."""

    def __init__(self, golden: str, kind: str, session: bool, views: bool) -> None:
        self.golden, self.kind, self.session, self.views = golden, kind, session, views

    def load(self) -> tuple[Any, Any]:
        """Returns the program or session to call, and the loaded program."""
        root = cgbundle.load(GOLDEN / f"{self.golden}.cgb", outputs="view" if self.views else "copy")
        return (root.session() if self.session else root), root

    def input(self, draw: random.Random) -> Any:
        rows = draw.choice((1, 4) if "state" in self.golden else (1, 3, 4))  # a model that draws random numbers cannot be padded
        values = numpy.array([[draw.uniform(-1, 1) for _ in range(16)] for _ in range(rows)], numpy.float32)
        if self.kind == "tensor":
            return cgbundle.Tensor(values.ctypes.data, "float32", values.shape, None, values)
        if self.kind == "torch":
            return torch.from_numpy(values)
        return values

    def __str__(self) -> str:
        return f"{self.golden} {self.kind}{' session' if self.session else ''}{' view' if self.views else ''}"


CASES = [
    Case("v1/cpu_mlp", "numpy", False, False),
    Case("v1/cpu_mlp", "torch", False, False),
    Case("v1/cpu_mlp", "tensor", False, False),
    Case("v1/cpu_mlp", "numpy", False, True),
    Case("v1/cpu_mlp", "numpy", True, False),
    Case("v1/cpu_state", "numpy", False, False),
]


def numbers(value: Any) -> list[float]:
    """Returns the elements of a call's outputs, in order."""
    if isinstance(value, list | tuple):
        return [number for element in value for number in numbers(element)]
    value = getattr(value, "tensor", value)
    return [float(number) for number in numpy.asarray(value).ravel()]


def right(case: Case, program: Any, x: Any) -> list[float]:
    """Returns the result of a call; resets the state of a program first."""
    if len(program.state):
        program.reset()
        program.seed(0)
    return numbers(program(x))


def run(case: Case, signals: Signals, count: int, draw: random.Random) -> dict[str, int]:
    """Sends a signal during each of `count` calls of one loaded program, and during its close. Returns the counts."""
    program, root = case.load()
    x = case.input(draw)
    expected = right(case, program, x)
    began = time.perf_counter()
    for _ in range(20):
        right(case, program, x)
    typical = (time.perf_counter() - began) / 20 * 1e6
    counts = {"interrupted": 0, "ended": 0, "wrong": 0}
    wrong_in_thread, stop = [0], threading.Event()

    def call_in_thread() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGALRM,))
        while not stop.wait(0.002):
            wrong_in_thread[0] += numbers(program(x)) != expected

    other = None
    if not case.session and not len(program.state) and not case.views:
        other = threading.Thread(target=call_in_thread)
        other.start()
    try:
        for _ in range(count):
            faulthandler.dump_traceback_later(HANG, exit=True)
            ended, actual = signals.during(lambda: right(case, program, x), draw.uniform(1, 1.5 * typical))
            counts["ended" if ended else "interrupted"] += 1
            counts["wrong"] += ended and actual != expected
            counts["wrong"] += right(case, program, x) != expected
    finally:
        stop.set()
        if other is not None:
            other.join()
    counts["wrong"] += wrong_in_thread[0]
    for closed in (program, root):
        while not signals.during(closed.close, draw.uniform(1, 200))[0]:
            counts["interrupted"] += 1
    try:
        program(x)
    except cgbundle.ProgramClosed:
        faulthandler.cancel_dump_traceback_later()
        return counts
    raise SystemExit(f"{case}: a call of a closed program")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tests.soak.signals", description=__doc__)
    parser.add_argument("--count", type=int, default=10000, help="signals that interrupt a call")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    outputs.LARGE = 1  # give small outputs their own memory too
    lost: list[object] = []
    sys.unraisablehook = lost.append
    signals, draw = Signals(), random.Random(options.seed)
    total = {"interrupted": 0, "ended": 0, "wrong": 0}
    number = 0
    while total["interrupted"] < options.count:
        case = CASES[number % len(CASES)]
        outputs.LARGE = (1, 128 << 10)[number // len(CASES) % 2]
        number += 1
        for name, value in run(case, signals, ROUND, draw).items():
            total[name] += value
        print(f"{total['interrupted']} interrupted, {total['ended']} not, {total['wrong']} wrong, {len(lost)} lost: {case}")
    return int(bool(total["wrong"] or lost))


if __name__ == "__main__":
    raise SystemExit(main())
