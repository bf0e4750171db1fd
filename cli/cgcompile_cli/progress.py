"""Shows the progress of a build or a benchmark on stderr: a line per finished stage.  On a terminal, a live line shows the running
stage.  Without a terminal (a log, a pipe) a long stage gets a line at its start, and more lines while it runs.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .output import console, duration, safe, say, size, stdout_kept, table

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table

    from cgcompile.util.progress import Event

    from .estimates import Estimate, Left

NAMES = 10
"""Columns for the name of a stage."""

IMPORT = "import"
"""The stage that imports torch.  It gets a plain line at its start, because importing Rich first would double the wait."""


LONG = {
    "export": "torch.export",
    "padding": "comparing padded calls with eager PyTorch",
    "lower": "Inductor and its compilers",
    "host": "Inductor and g++, for what runs on the host",
    "record": "capturing every int_key, in two processes",
    "interpret": "running the kernels on the CPU",
    "warm up": "compiling the models that are compared",
    "cold": "starting processes, one after the other",
}
"""Stages that may take half a minute, with descriptions."""

OFTEN = 10.0
"""Minimum seconds between two lines about a long stage, without a terminal."""

SHORTEST = 1.0
"""Minimum seconds of an estimate that is shown.  A shorter estimate means that the running stage takes longer than in the earlier
build, so that its end is unknown."""


BAR = 20
"""Columns of the bar."""


@contextmanager
def watching(quiet: bool, verbose: bool = False, estimate: Estimate | None = None) -> Iterator[Progress | None]:
    """Yields the progress display of a build or a benchmark, None if `quiet`.  Output of model code and child processes goes to
    stderr, so that stdout contains only data."""
    with ExitStack() as stack:
        stack.enter_context(stdout_kept())
        yield None if quiet else Progress(stack, verbose, estimate)


def begin(stage: str, text: str) -> None:
    """Writes a plain line at the start of a stage."""
    say(f"{stage:<{NAMES}} {'...':>10}  {text}".rstrip())


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Resources that a process has used.  `self_seconds`, `others`: CPU seconds of the process and of its finished children.
    `memory`, `largest`: peak bytes of the process and of its largest child."""

    self_seconds: float
    others: float
    memory: int
    largest: int


def spent() -> Spent:
    """Returns the usage of this process."""
    usage, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    return Spent(
        self_seconds=usage.ru_utime + usage.ru_stime, others=others.ru_utime + others.ru_stime,
        memory=usage.ru_maxrss * unit, largest=others.ru_maxrss * unit,
    )  # fmt: skip


class Progress:
    """Prints a line for every finished stage of a build, with `verbose` also for details.  On a terminal the running stage has a
    live line until `stack` is closed, with a bar if `estimate` knows an earlier build."""

    def __init__(self, stack: ExitStack, verbose: bool = False, estimate: Estimate | None = None) -> None:
        self._stack, self._verbose, self._estimate = stack, verbose, estimate
        self._live: Live | None = None
        self._spinner: Spinner | None = None
        self._stage, self._detail, self._begin = "", "", 0.0
        self._last_line = 0.0
        self._before = spent()
        self._rows: list[tuple[str, ...]] = []

    def __call__(self, event: Event) -> None:
        if self._live is None and event.stage != IMPORT and sys.stderr.isatty():
            self._begin_live()
        if event.state == "done":
            self._print(f"{event.stage:<{NAMES}} {duration(event.seconds):>10}  {event.text}")
            self._stage = ""
            self._count(event)
            if self._estimate is not None:
                self._estimate.done(event.stage, event.seconds, cached=event.text.endswith("from the cache"))
            return
        left = self._time_left(event.stage, event.seconds)
        left_text = f", about {_about(left.seconds)} left" if left is not None and left.seconds >= SHORTEST else ""
        if self._live is None and event.state == "start" and event.stage in LONG:
            begin(event.stage, LONG[event.stage] + left_text)
            self._last_line = 0.0
        if event.stage == IMPORT and event.state == "detail" and not self._detail:
            begin(event.stage, event.text)
        elif event.state == "detail" and event.text and (self._verbose or self._due(event)):
            self._last_line = event.seconds
            text = event.text + (left_text if event.stage in LONG and self._live is None else "")
            self._print(f"{'':<{NAMES}} {'+' + duration(event.seconds):>10}    {text}")
        self._stage, self._detail, self._begin = event.stage, event.text, time.perf_counter() - event.seconds

    def _count(self, event: Event) -> None:
        """Adds a row with the resources that a finished stage has used."""
        now, previous = spent(), self._before
        seconds = (event.seconds, now.self_seconds - previous.self_seconds, now.others - previous.others)
        self._rows.append((event.stage, *map(duration, seconds), size(now.memory), size(now.largest)))
        self._before = now

    def stages(self) -> Table:
        """Returns a row for every finished stage: seconds, CPU seconds, and peak memory."""
        return table(("", ">seconds", ">processor", ">in others", ">memory", ">of the largest other"), self._rows)

    def _time_left(self, stage: str, seconds: float) -> Left | None:
        return self._estimate.left(stage, seconds) if self._estimate is not None else None

    def _due(self, event: Event) -> bool:
        """Returns whether a long stage needs a new line in a log."""
        return self._live is None and event.stage in LONG and event.seconds - self._last_line >= OFTEN

    def _begin_live(self) -> None:
        target = console(sys.stderr)
        if target.is_dumb_terminal:
            return
        from rich.live import Live
        from rich.spinner import Spinner

        self._spinner = Spinner("line")
        live = Live(console=target, get_renderable=self.running, refresh_per_second=8, transient=True)
        self._live = self._stack.enter_context(live)

    def _print(self, line: str) -> None:
        if self._live is None:
            say(line.rstrip())
        else:
            self._live.console.print(safe(line.rstrip()), no_wrap=True, overflow="ellipsis")  # above the live line

    def running(self) -> Table:
        """Makes the live line: a spinner, stage, elapsed time, bar, remaining time, and the latest detail."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        line = Table.grid(padding=(0, 1, 0, 0))
        for _ in range(5):
            line.add_column(no_wrap=True, overflow="ellipsis")
        if self._stage:
            elapsed = time.perf_counter() - self._begin
            left = self._time_left(self._stage, elapsed)
            bar = ProgressBar(total=1.0, completed=left.part, width=BAR) if left is not None else ""
            left_text = f"{_about(left.seconds)} left" if left is not None and left.seconds >= SHORTEST else ""
            line.add_row(f"{safe(self._stage):<{NAMES}} {elapsed:>8.1f} s", self._spinner, bar, left_text, safe(self._detail))
        return line


def _about(seconds: float) -> str:
    """Formats seconds; from a minute on, they are rounded down to tens."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60 // 10 * 10:02d} s"
