"""What a build tells whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """`state` is start, detail or done; `seconds` since the stage began (0.0 at start).  `text` is "" at start, and what the stage
    gave when it is done."""

    stage: str
    state: str
    text: str
    seconds: float


Watcher = Callable[[Event], None]
Tell = Callable[[str], None]
"""What a stage says of its progress."""


def named(tell: Tell, name: str) -> Tell:
    """`tell` for one of several that a stage works on: what it says has the name before it."""
    return lambda text: tell(f"{name}: {text}")


def each_named(tell: Tell, names: Sequence[str]) -> list[Tell]:
    """`tell` for each of several: `decode, 2 of 4: ...`; where there is one, as it is."""
    return [named(tell, f"{name}, {at} of {len(names)}") if len(names) > 1 else tell for at, name in enumerate(names, 1)]


def silent(event: Event) -> None:
    """The watcher of a build that nobody watches."""


class Stage:
    """What runs in a stage tells it: `tell("3 of 12 kernels")` a detail, `tell.result("12 kernels")` what the end is told with."""

    def __init__(self, name: str, watcher: Watcher) -> None:
        self._name, self._watcher, self._start = name, watcher, time.perf_counter()
        self._result = ""
        watcher(Event(stage=name, state="start", text="", seconds=0.0))

    def __call__(self, text: str) -> None:
        self._watcher(Event(stage=self._name, state="detail", text=text, seconds=time.perf_counter() - self._start))

    def result(self, text: str) -> None:
        """What the stage gave."""
        self._result = text

    def end(self) -> float:
        """Tells the end.  Seconds that it took."""
        taken = time.perf_counter() - self._start
        self._watcher(Event(stage=self._name, state="done", text=self._result, seconds=taken))
        return taken


class Stages:
    """Runs stages, `with stages("lower") as tell: ... tell.result("12 kernels")`, and remembers how long each took."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[Stage]:
        running = Stage(stage, self._watcher)
        yield running
        self.seconds.append((stage, running.end()))
