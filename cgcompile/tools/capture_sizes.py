"""Chooses capture sizes for a log of requests, with the least padding.  Pure functions.

A request of size s is served by the smallest capture size of at least s; the difference is padding.  An optimal choice contains
only sizes of the log: a capture size above the largest request that it serves only adds padding.  The largest size of the log is
always chosen.  Let s[0] < s[1] < ... be the n distinct sizes, and `reach[j]` the number of requests of at most s[j].  The minimum
number of rows that k capture sizes compute for the requests up to s[j] is

    rows[k][j] = min over i < j of rows[k - 1][i] + s[j] * (reach[j] - reach[i])

The term s[j] * reach[j] does not depend on i.  The rest is a line in s[j] for each i, with slope -reach[i] and height
rows[k - 1][i].  Slopes fall with i, and s[j] rises with j.  So a queue with the lower envelope of the lines gives the minimum of
every j, in O(n) for all: the "convex hull trick".  All numbers are integers, so nothing is rounded.
"""

from __future__ import annotations

import csv
import io
import shlex
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

from ..errors import BuildError

STDIN = "-"
"""The path that means standard input."""

DIGITS = 15
"""Maximum digits of a size: a longer number is a timestamp or an identifier."""

MARGIN = 1.0
"""Percentage points of waste that are accepted for fewer sizes, because each size costs build time and memory for its graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Capture sizes, ascending.  `served`: the sum of all requests' sizes; `padded`: the number of padded rows."""

    sizes: tuple[int, ...]
    served: int
    padded: int

    @property
    def wasted(self) -> float:
        """Padding in percent of all computed rows."""
        return 100 * self.padded / (self.served + self.padded)


def read_request_log(path: str, *columns: str) -> tuple[Counter[int], ...]:
    """Counts each size in a file with one size per line, or in each of `columns` of a CSV file with a header.

    A CSV file may be separated by commas, semicolons or tabs.  `path` may be "-" for standard input; empty lines are skipped.
    Raises request-log-missing, request-log-invalid (with the line), request-log-column-unknown.
    """
    where = "standard input" if path == STDIN else path
    text = _read(path)
    counts = [_column(text, column, where) for column in columns] if columns else [_lines(text, where)]
    if not all(counts):
        raise BuildError(
            "request-log-invalid", f"{where}: no sizes", "give one request size per line, or a CSV file and --column NAME"
        )
    return tuple(counts)


def propose(counts: Mapping[int, int], most: int, multiple: int = 1) -> tuple[Proposal, ...]:
    """Returns the best choices of 1, 2, ... `most` capture sizes, all multiples of `multiple`, for requests with `counts` (size ->
    positive count).  Returns fewer proposals if more sizes would save nothing.

    n distinct sizes take O(n * most) time and n * most * 8 bytes.  Raises limit-invalid, and request-log-invalid for no counts.
    """
    for name, limit in (("the number of sizes", most), ("the multiple", multiple)):
        if limit < 1:
            raise BuildError("limit-invalid", f"{name} is {limit}, expected at least 1")
    if not counts:
        raise BuildError("request-log-invalid", "the counts: no sizes")
    rounded: Counter[int] = Counter()
    for size, count in counts.items():
        rounded[-(-size // multiple) * multiple] += count
    sizes = sorted(rounded)
    served = sum([size * count for size, count in counts.items()])
    chosen = _cheapest(sizes, [rounded[size] for size in sizes], min(most, len(sizes)))
    return tuple([Proposal(sizes=picked, served=served, padded=rows - served) for rows, picked in chosen])


def choose(proposals: Sequence[Proposal], margin: float = MARGIN) -> Proposal:
    """Returns the proposal with the fewest sizes whose waste is within `margin` percentage points of the minimum."""
    best = min(proposal.wasted for proposal in proposals)
    return next(proposal for proposal in proposals if proposal.wasted <= best + margin)


# --- reading ----------------------------------------------------------------------------------------------------


def _read(path: str) -> str:
    try:
        if path == STDIN:
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except FileNotFoundError:
        raise BuildError("request-log-missing", f"{path}: no such file") from None
    return data.decode("utf-8-sig", "replace")


def _lines(text: str, where: str) -> Counter[int]:
    cells = [line.strip() for line in text.split("\n")]
    counts = _count([cell for cell in cells if cell])
    if counts is not None:
        return counts
    line, cell = next((line, cell) for line, cell in enumerate(cells, 1) if cell and _count([cell]) is None)
    names = _header(text) if line == 1 else []
    hint = f"name the column that holds the sizes: --column {shlex.quote(names[-1])}" if any(map(str.isidentifier, names)) else ""
    raise BuildError("request-log-invalid", f"{where}: line {line}: {_problem(cell)}", hint)


def _column(text: str, column: str, where: str) -> Counter[int]:
    header = _header(text)
    if header.count(column) != 1:
        problem = "more than one column" if column in header else "no column"
        raise BuildError("request-log-column-unknown", f"{where}: {problem} {column!r} (columns: {', '.join(header) or 'none'})")
    index = header.index(column)
    rows = _rows(text)
    try:
        next(rows)
        counts = _count(list(map(str.strip, map(itemgetter(index), filter(None, rows)))))
        if counts is not None:
            return counts
        rows = _rows(text)
        next(rows)
        cell = next(cell for row in rows if row and _count([cell := row[index].strip()]) is None)
    except IndexError:
        raise BuildError("request-log-invalid", f"{where}: line {rows.line_num}: no value in column {column!r}") from None
    except csv.Error as error:
        raise BuildError("request-log-invalid", f"{where}: line {rows.line_num}: {error}") from None
    raise BuildError("request-log-invalid", f"{where}: line {rows.line_num}: column {column!r}: {_problem(cell)}")


def _rows(text: str) -> Any:
    """Returns a `csv.reader`.  The delimiter is the most frequent one in the header: comma, semicolon, or tab."""
    return csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=text.partition("\n")[0].count), strict=True)


def _header(text: str) -> list[str]:
    """Returns the names in the first line of a CSV file, [] if it is not valid CSV."""
    try:
        return [head.strip() for head in next(_rows(text), [])]
    except csv.Error:
        return []


def _count(cells: Sequence[str]) -> Counter[int] | None:
    """Counts the sizes; returns None if a cell is not a positive integer in ASCII digits."""
    digits = "".join(cells)
    if not (digits.isascii() and digits.isdigit() and all(cells) and max(map(len, cells)) <= DIGITS):
        return None if cells else Counter()
    sizes = list(map(int, cells))
    return None if 0 in sizes else Counter(sizes)


def _problem(cell: str) -> str:
    shown = repr(cell[:40])
    if not (cell.isascii() and cell.removeprefix("-").isdigit()):
        return f"{shown} is not a whole number"
    return f"{shown} is no size: at least 1" if cell.startswith("-") or len(cell) <= DIGITS else f"{shown} is too large for a size"


# --- choosing ---------------------------------------------------------------------------------------------------


def _cheapest(sizes: Sequence[int], counts: Sequence[int], most: int) -> list[tuple[int, tuple[int, ...]]]:
    """Returns for k = 1..most the minimum number of computed rows with k capture sizes, and these sizes.  They are chosen from the
    ascending `sizes`, always with the last one."""
    reach = list(accumulate(counts))
    largest, total = sizes[-1], reach[-1]
    rows = [size * below for size, below in zip(sizes, reach, strict=True)]
    choices: list[tuple[int, tuple[int, ...]]] = [(rows[-1], (largest,))]
    layers: list[array[int]] = []
    while len(choices) < most:
        ends = [row + largest * (total - below) for row, below in zip(rows[:-1], reach, strict=False)]
        fewest = min(ends)
        index = ends.index(fewest)
        picked = [largest, sizes[index]]
        for layer in reversed(layers):
            index = layer[index]
            picked.append(sizes[index])
        choices.append((fewest, tuple(reversed(picked))))
        if len(choices) < most:  # the last iteration needs no further layer
            rows, chosen = _one_more(sizes, reach, rows)
            layers.append(chosen)
    return choices


def _one_more(sizes: Sequence[int], reach: Sequence[int], rows: Sequence[int]) -> tuple[list[int], array[int]]:
    """Returns `rows` for one more capture size, and for every j the i of the minimum; see the docstring of this module."""
    # `lines`: the i of each line in the lower envelope.  Entry n is the lowest from size starts[n] up to starts[n + 1].
    lines, starts, best = [0], [0], 0
    next_rows, chosen = [rows[0]], array("q", [0])
    for j in range(1, len(sizes)):
        size = sizes[j]
        while best + 1 < len(lines) and starts[best + 1] <= size:
            best += 1
        i = lines[best]
        next_rows.append(rows[i] + size * (reach[j] - reach[i]))
        chosen.append(i)
        height, slope = rows[j], reach[j]
        while True:
            last = lines[-1]
            start = -((rows[last] - height) // (slope - reach[last]))  # the smallest size at which line j is not above the last one
            if start > starts[-1] or len(lines) == best + 1:
                break
            lines.pop()
            starts.pop()
        lines.append(j)
        starts.append(start)
    return next_rows, chosen
