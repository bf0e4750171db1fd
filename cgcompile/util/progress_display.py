"""How a build shows its progress by itself: on stderr, a line for every finished stage and one for the stage that runs.

Plain text, which terminals and notebooks draw alike; the command line has a display of its own.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ..errors import BuildError
from .progress import Event, Watcher, silent

Progress = Watcher | Literal["bar", "silent"] | None
"""Who is told of stages: a function, or "bar" (shown), "silent" (not), None (shown where somebody looks)."""

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
