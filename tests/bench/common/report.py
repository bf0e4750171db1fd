"""Plain-text tables: Rich may not be installed on a machine with a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


class Console:
    """Prints tables to standard output."""

    def print(self, text: str = "") -> None:
        print(text, flush=True)


def console() -> Console:
    return Console()


def table(where: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Prints a table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    where.print(title)
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = [
            text.rjust(width) if index else text.ljust(width) for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        where.print(" " + "  ".join(cells).rstrip())
    where.print(f" {note}\n" if note else "")


def spread(seconds: Sequence[float]) -> str:
    """Returns median, smallest and largest as `0.412 s (0.405-0.430)`."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f}-{max(seconds):.3f})"


def milliseconds(seconds: Sequence[float]) -> str:
    """Returns median, smallest and largest as `12.3 ms (12.0-14.1)`."""
    return f"{statistics.median(seconds) * 1e3:.1f} ms ({min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f})"


def mebibytes(kib: int) -> str:
    """Returns a text such as `86.7 MiB`."""
    return f"{kib / 1024:.1f} MiB"


def goal(value: float, bound: float, unit: str, at_least: bool = False) -> str:
    """Returns a text such as `14.2 x (at least 6 x: met)`."""
    met = value >= bound if at_least else value <= bound
    return f"{value:.1f} {unit} ({'at least' if at_least else 'at most'} {bound:g} {unit}: {'met' if met else 'MISSED'})"
