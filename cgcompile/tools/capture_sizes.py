"""Capture sizes for a log of requests: those that waste the least padding.  Pure.

A request of size s is served by the smallest capture size that holds it, and the rest is padding.  Some best choice consists of
sizes that occur in the log: lowering a capture size to the largest request that it serves wastes less.  The largest size is always
among them.  Let s[0] < s[1] < ... be the n distinct sizes, and `reach[j]` the number of requests no larger than s[j].  The fewest
rows that k capture sizes compute for the requests up to s[j] are

    rows[k][j] = min over i < j of rows[k - 1][i] + s[j] * (reach[j] - reach[i])

For one j these are lines in s[j], of slope -reach[i] and height rows[k - 1][i].  Slopes fall and s[j] rises, so the lower envelope
of the lines so far, kept in a queue, answers all j in O(n): the "convex hull trick".  Whole numbers throughout: nothing rounds.
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
"""Digits that a size may have: what is longer is a timestamp or an identifier, not a size."""

MARGIN = 1.0
"""Percentage points of waste that are given away for fewer sizes: each costs time to build and memory for its graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Capture sizes, ascending; `served` is the sum of all requests' sizes, `padded` the rows that are computed beside them."""

    sizes: tuple[int, ...]
    served: int
    padded: int

    @property
    def wasted(self) -> float:
        """Percent of all computed rows that are padding."""
        return 100 * self.padded / (self.served + self.padded)


def read_request_log(path: str, *columns: str) -> tuple[Counter[int], ...]:
    """How often each size occurs in a file of one size per line, or, for each of `columns`, there in a CSV file with a header.

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
    """The best choice of 1, 2, ... `most` capture sizes, all multiples of `multiple`, for requests that occur as `counts` says
    (size -> how often, both positive); fewer proposals where more sizes would save nothing.

    n distinct sizes take O(n * most) time and n * most * 8 bytes.  Raises limit-invalid, and request-log-invalid for no counts.
    """
    for name, limit in (("the number of sizes", most), ("the multiple", multiple)):
        if limit < 1:
            raise BuildError("limit-invalid", f"{name} is {limit}, expected at least 1")
    if not counts:
        raise BuildError("request-log-invalid", "the trace: no sizes")
    rounded: Counter[int] = Counter()
    for size, count in counts.items():
        rounded[-(-size // multiple) * multiple] += count
    sizes = sorted(rounded)
    served = sum([size * count for size, count in counts.items()])
    chosen = _cheapest(sizes, [rounded[size] for size in sizes], min(most, len(sizes)))
    return tuple([Proposal(sizes=picked, served=served, padded=rows - served) for rows, picked in chosen])


def choose(proposals: Sequence[Proposal], margin: float = MARGIN) -> Proposal:
    """The fewest sizes whose waste is within `margin` percentage points of the best one's."""
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
    names = _heads(text) if line == 1 else []
    hint = f"name the column that holds the sizes: --column {shlex.quote(names[-1])}" if any(map(str.isidentifier, names)) else ""
    raise BuildError("request-log-invalid", f"{where}: line {line}: {_problem(cell)}", hint)


def _column(text: str, column: str, where: str) -> Counter[int]:
    heads = _heads(text)
    if heads.count(column) != 1:
        problem = "more than one column" if column in heads else "no column"
        raise BuildError("request-log-column-unknown", f"{where}: {problem} {column!r} (columns: {', '.join(heads) or 'none'})")
    at = heads.index(column)
    rows = _rows(text)
    try:
        next(rows)
        counts = _count(list(map(str.strip, map(itemgetter(at), filter(None, rows)))))
        if counts is not None:
            return counts
        rows = _rows(text)
        next(rows)
        cell = next(cell for row in rows if row and _count([cell := row[at].strip()]) is None)
    except IndexError:
        raise BuildError("request-log-invalid", f"{where}: line {rows.line_num}: no value in column {column!r}") from None
    except csv.Error as error:
        raise BuildError("request-log-invalid", f"{where}: line {rows.line_num}: {error}") from None
    raise BuildError("request-log-invalid", f"{where}: line {rows.line_num}: column {column!r}: {_problem(cell)}")


def _rows(text: str) -> Any:
    """A `csv.reader`: values are separated by what the header has most of: commas, semicolons, or tabs."""
    return csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=text.partition("\n")[0].count), strict=True)


def _heads(text: str) -> list[str]:
    """The names in the first line of a CSV file, none where it is not one."""
    try:
        return [head.strip() for head in next(_rows(text), [])]
    except csv.Error:
        return []


def _count(cells: Sequence[str]) -> Counter[int] | None:
    """How often each size occurs, or None where a cell is no positive whole number in ASCII digits."""
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
    """For k = 1..most the fewest computed rows with k of the `sizes` (ascending, the last always among them), and these."""
    reach = list(accumulate(counts))
    largest, total = sizes[-1], reach[-1]
    rows = [size * below for size, below in zip(sizes, reach, strict=True)]
    choices: list[tuple[int, tuple[int, ...]]] = [(rows[-1], (largest,))]
    layers: list[array[int]] = []
    while len(choices) < most:
        ends = [row + largest * (total - below) for row, below in zip(rows[:-1], reach, strict=False)]
        fewest = min(ends)
        at = ends.index(fewest)
        picked = [largest, sizes[at]]
        for layer in reversed(layers):
            at = layer[at]
            picked.append(sizes[at])
        choices.append((fewest, tuple(reversed(picked))))
        if len(choices) < most:  # the whole layer is for the next one only
            rows, chosen = _one_more(sizes, reach, rows)
            layers.append(chosen)
    return choices


def _one_more(sizes: Sequence[int], reach: Sequence[int], rows: Sequence[int]) -> tuple[list[int], array[int]]:
    """`rows` for one more capture size, and for every j the i at which that is reached; the head of this file says how.

    `lines` are those of the lower envelope; line n of it is the lowest from `starts[n]` on, a whole number, until line n + 1 is.
    """
    lines, starts, best = [0], [0], 0
    out, chosen = [rows[0]], array("q", [0])
    for j in range(1, len(sizes)):
        size = sizes[j]
        while best + 1 < len(lines) and starts[best + 1] <= size:
            best += 1
        i = lines[best]
        out.append(rows[i] + size * (reach[j] - reach[i]))
        chosen.append(i)
        height, slope = rows[j], reach[j]
        while True:
            last = lines[-1]
            start = -((rows[last] - height) // (slope - reach[last]))  # where line j comes down to the last one
            if start > starts[-1] or len(lines) == best + 1:
                break
            lines.pop()
            starts.pop()
        lines.append(j)
        starts.append(start)
    return out, chosen
