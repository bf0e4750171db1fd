"""Compares the output of a command with the output that a page shows.

`...` in a line matches any text; as a whole line it matches any lines. A number with a unit, a fraction or an exponent matches any
number with a unit of the same kind. Column widths do not count. All other text must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ANYTHING = "..."

NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
UNITS = (
    ("min", "s", "ms", "us", "ns"),
    ("B", "KB", "MB", "GB", "KiB", "MiB", "GiB"),
    ("%",),
)  # fmt: skip
"""Kinds of units, each of which matches the others of its kind."""

WORD = re.compile(rf"(?<![\w.])({NUMBER})( ?)(min \d+ s|[A-Za-z]+|%)?(?![\w])")


def difference(shown: str, got: str) -> str:
    """Returns the first line of `shown` that `got` does not have in its place, or ""."""
    lines = [line.rstrip() for line in got.splitlines()]
    parts: list[list[str]] = [[]]
    for line in shown.splitlines():
        if line.strip() == ANYTHING:
            parts.append([])
        else:
            parts[-1].append(line.rstrip())
    place = 0
    for index, part in enumerate(parts):
        patterns = [pattern(line) for line in part]
        last = index == len(parts) - 1
        if index == 0:
            starts = [0]
        elif last:
            starts = [len(lines) - len(part)] if len(lines) - len(part) >= place else []
        else:
            starts = list(range(place, len(lines) - len(part) + 1))
        begin = next((start for start in starts if _fits(patterns, lines[start : start + len(part)])), None)
        if begin is None:
            return _first_missing(part, patterns, lines[place:])
        place = begin + len(part)
    return "" if place == len(lines) or len(parts) > 1 else f"nothing more than was shown, got: {lines[place]}"


def pattern(line: str) -> re.Pattern[str]:
    """Returns a regular expression for a shown line."""
    indent = len(line) - len(line.lstrip())
    pieces = [_piece(piece) for piece in line.strip().split(ANYTHING)]
    return re.compile(r"\s*" * bool(indent) + ".*".join(pieces))


def _piece(text: str) -> str:
    expression, place = "", 0
    for match in WORD.finditer(text):
        number, space, unit = match.groups()
        kind = next((kind for kind in UNITS if unit and unit.split()[0] in kind), None)
        if kind is None and not re.search(r"[.e]", number):
            continue
        expression += _plain(text[place : match.start()]) + NUMBER
        if kind is not None:
            expression += (" ?" if space else "") + "(?:" + "|".join(map(re.escape, kind)) + r")(?: \d+ s)?"
        elif unit:
            expression += _plain(space + unit)
        else:
            expression += _plain(space)
        place = match.end()
    return expression + _plain(text[place:])


def _plain(text: str) -> str:
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def _fits(patterns: Sequence[re.Pattern[str]], lines: Sequence[str]) -> bool:
    return len(patterns) == len(lines) and all(regex.fullmatch(line) for regex, line in zip(patterns, lines, strict=True))


def _first_missing(part: Sequence[str], patterns: Sequence[re.Pattern[str]], lines: Sequence[str]) -> str:
    for line, regex in zip(part, patterns, strict=True):
        if not any(regex.fullmatch(one) for one in lines):
            return line
    return " / ".join(part) + " (together, at this place)"
