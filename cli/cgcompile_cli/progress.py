"""The progress of a build or a benchmark on stderr: a line per finished stage, on a terminal also a live one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .output import console, duration, safe, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cgcompile.util.progress import Event, Watcher

NAMES = 10
"""Columns for the name of a stage."""


@contextmanager
def watching(quiet: bool, verbose: bool = False) -> Iterator[Watcher | None]:
    """What a build or a benchmark tells of its stages: None where it is to be `quiet`."""
    if quiet:
        yield None
        return
    target = console(sys.stderr)
    if not target.is_terminal or target.is_dumb_terminal:
        yield Progress(verbose)
        return
    from rich.live import Live

    shown = Progress(verbose)
    with Live(console=target, get_renderable=shown.running, refresh_per_second=8, transient=True):
        shown.console = target  # above the live line
        yield shown


class Progress:
    """Watches a build: prints a line for every finished stage, with `verbose` also for what happens inside one, and gives a live
    line for the stage that runs."""

    def __init__(self, verbose: bool = False) -> None:
        from rich.spinner import Spinner

        self.console: Console | None = None
        self._verbose = verbose
        self._spinner = Spinner("line")
        self._stage, self._detail, self._begin = "", "", 0.0

    def __call__(self, event: Event) -> None:
        if event.state == "done":
            self._print(f"{event.stage:<{NAMES}} {duration(event.seconds):>10}  {event.text}")
            self._stage = ""
            return
        if self._verbose and event.state == "detail" and event.text:
            self._print(f"{'':<{NAMES}} {'+' + duration(event.seconds):>10}    {event.text}")
        self._stage, self._detail, self._begin = event.stage, event.text, time.perf_counter() - event.seconds

    def _print(self, line: str) -> None:
        if self.console is None:
            say(line.rstrip())
        else:
            self.console.print(safe(line.rstrip()), no_wrap=True, overflow="ellipsis")

    def running(self) -> Table:
        """The live line: a spinner, the stage, how long it has run, the latest detail."""
        from rich.table import Table

        line = Table.grid(padding=(0, 1, 0, 0))
        for _ in range(3):
            line.add_column(no_wrap=True, overflow="ellipsis")
        if self._stage:
            seconds = f"{time.perf_counter() - self._begin:.1f} s"
            line.add_row(f"{safe(self._stage):<{NAMES}} {seconds:>10}", self._spinner, safe(self._detail))
        return line
