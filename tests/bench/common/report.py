"""The tables: plain text, or Rich's where it is installed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Wide enough for the tables where standard output is no terminal."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=110)


def table(where: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Prints a table: the first column to the left, numbers to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, caption=note or None)
    made.caption_justify = "left"
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left")
    for row in rows:
        made.add_row(*row)
    where.print(made)


def spread(seconds: Sequence[float]) -> str:
    """`0.412 s (0.405-0.430)`: median, smallest and largest."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f}-{max(seconds):.3f})"


def milliseconds(seconds: Sequence[float]) -> str:
    """`12.3 ms (12.0-14.1)`: median, smallest and largest."""
    return f"{statistics.median(seconds) * 1e3:.1f} ms ({min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f})"


def mebibytes(kib: int) -> str:
    """`86.7 MiB`."""
    return f"{kib / 1024:.1f} MiB"


def goal(value: float, bound: float, unit: str, at_least: bool = False) -> str:
    """`14.2 x (at least 6 x: met)`."""
    met = value >= bound if at_least else value <= bound
    return f"{value:.1f} {unit} ({'at least' if at_least else 'at most'} {bound:g} {unit}: {'met' if met else 'MISSED'})"
