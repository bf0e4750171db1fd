"""What a build tells its watcher, and the plain display: on stderr, a line per finished stage and one for the stage that runs.

The command line has a display of its own.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ..errors import BuildError


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """`state` is start, detail or done; `seconds` since the stage began (0.0 at start).  `text` is "" at start, and the result of
    the stage when it is done."""

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


def named_tells(tell: Tell, names: Sequence[str]) -> list[Tell]:
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


Progress = Watcher | Literal["bar", "silent"] | None
"""How stages are reported: to a function, "bar" (shown), "silent" (not shown), None (shown on a terminal or in a notebook)."""

NAMES = 10
"""Columns for the name of a stage."""


@contextmanager
def watcher(progress: Progress) -> Iterator[Watcher]:
    """The function that is told.  Raises progress-unknown."""
    if callable(progress):
        yield progress
        return
    if progress not in (None, "bar", "silent"):
        raise BuildError("progress-unknown", f"progress is {progress!r}, expected None, 'bar', 'silent' or a function of an Event")
    if progress == "silent" or (progress is None and not _looked_at()):
        yield silent
        return
    lines = Lines()
    try:
        yield lines
    finally:
        lines.clear()


def _looked_at() -> bool:
    """Whether stderr is a terminal, or a notebook's."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or getattr(shell, "kernel", None) is not None


class Lines:
    """Writes the lines.  The one of the stage that runs is written over, as far as it is long."""

    def __init__(self) -> None:
        self._width = 0

    def __call__(self, event: Event) -> None:
        self.clear()
        if event.state == "done":
            sys.stderr.write(f"{event.stage:<{NAMES}} {event.seconds:6.1f} s  {event.text}".rstrip() + "\n")
        else:
            columns = shutil.get_terminal_size((100, 24)).columns - 1
            line = f"{event.stage:<{NAMES}} {event.seconds:6.1f} s  {event.text}".rstrip()[:columns]
            sys.stderr.write(line)
            self._width = len(line)
        sys.stderr.flush()

    def clear(self) -> None:
        """Takes away the line of the stage that runs."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0
