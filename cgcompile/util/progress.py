"""Events of a build, and a simple display on stderr: a line for each finished stage and one for the running stage.

The command line has a different display.
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
"""Reports a stage's progress as text."""


def named(tell: Tell, name: str) -> Tell:
    """Returns a `tell` that puts the name before each text."""
    return lambda text: tell(f"{name}: {text}")


def named_tells(tell: Tell, names: Sequence[str]) -> list[Tell]:
    """Returns a `tell` for each entry, which writes `entry decode (2 of 4): ...`.  For a single entry it returns `tell` itself."""
    counts = [f"entry {name} ({number} of {len(names)})" for number, name in enumerate(names, 1)]
    return [named(tell, text) if len(names) > 1 else tell for text in counts]


def silent(event: Event) -> None:
    """Ignores an event."""


class Stage:
    """A running stage: `tell("3 of 12 kernels")` reports a detail, `tell.result("12 kernels")` sets the text of its end."""

    def __init__(self, name: str, watcher: Watcher) -> None:
        self._name, self._watcher, self._start = name, watcher, time.perf_counter()
        self._result = ""
        watcher(Event(stage=name, state="start", text="", seconds=0.0))

    def __call__(self, text: str) -> None:
        self._watcher(Event(stage=self._name, state="detail", text=text, seconds=time.perf_counter() - self._start))

    def result(self, text: str) -> None:
        """Sets the text for the end of the stage."""
        self._result = text

    def end(self) -> float:
        """Reports the end, and returns the seconds of the stage."""
        seconds = time.perf_counter() - self._start
        self._watcher(Event(stage=self._name, state="done", text=self._result, seconds=seconds))
        return seconds


class Stages:
    """Runs stages, `with stages("lower") as tell: ... tell.result("12 kernels")`, and collects their seconds."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[Stage]:
        running = Stage(stage, self._watcher)
        yield running
        self.seconds.append((stage, running.end()))


Progress = Watcher | Literal["bar", "silent"] | None
"""Where the progress of a build goes: to a function, on stderr ("bar"), or nowhere ("silent").  None shows it on stderr if stderr
is a terminal or a notebook."""

NAMES = 10
"""Columns for the name of a stage."""


@contextmanager
def watcher(progress: Progress) -> Iterator[Watcher]:
    """Yields the function that gets the events.  Raises progress-unknown."""
    if callable(progress):
        yield progress
        return
    if progress not in (None, "bar", "silent"):
        raise BuildError("progress-unknown", f"progress is {progress!r}, expected None, 'bar', 'silent' or a function of an Event")
    if progress == "silent" or (progress is None and not _is_interactive()):
        yield silent
        return
    lines = Lines()
    try:
        yield lines
    finally:
        lines.clear()


def _is_interactive() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or getattr(shell, "kernel", None) is not None


class Lines:
    """Writes the lines, and overwrites the line of the running stage."""

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
        """Clears the line of the running stage."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0
