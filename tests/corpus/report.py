"""Formats rows as tables for a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

from .results import BUILT, CRASHED, FAILED, GOOD, MISSING, REFUSED, RIGHT, STOPPED, TIMEOUT, UNDONE, WRONG, Row

VERDICTS = (RIGHT, BUILT, REFUSED, FAILED, WRONG, CRASHED, TIMEOUT, STOPPED, MISSING)


def summary(rows: Sequence[Row]) -> str:
    """Returns, for each target, a table by family, all cases that are neither right nor built, and slow cases."""
    return "\n".join([line for target in sorted({row.target for row in rows}) for line in _target(target, rows)])


def _target(target: str, every: Sequence[Row]) -> list[str]:
    rows = [row for row in every if row.target == target]
    used = [verdict for verdict in VERDICTS if any(row.verdict == verdict for row in rows)]
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        families[row.name.rpartition("/")[0]][row.verdict] += 1
    lines = [f"## {target}", "", f"| family | {' | '.join(used)} |", f"|---|{'---|' * len(used)}"]
    lines += [
        f"| {family} | {' | '.join(str(counts[label] or '') for label in used)} |" for family, counts in sorted(families.items())
    ]
    total = Counter(row.verdict for row in rows)
    lines.append(f"| all | {' | '.join(str(total[label]) for label in used)} |")
    tried = [row for row in rows if row.verdict not in UNDONE]
    good = [row for row in tried if row.verdict in GOOD]
    between = Counter(row.between for row in rows if row.between)
    seconds = [row.seconds for row in good] or [0.0]
    share = f"{len(good)} of {len(tried)} good ({len(good) / max(1, len(tried)):.1%})"
    inner = ", ".join(f"{count} {what}" for what, count in between.most_common()) or "none"
    took = f"seconds of a case: median {median(seconds):.0f}, most {max(seconds):.0f}"
    lines += ["", f"{share}; {took}; a size between those recorded: {inner}", ""]
    for row in sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), row.name)):
        if row.verdict not in (RIGHT, BUILT):
            lines.append(f"- {row.verdict}: {row.name}: {_short(row)}")
    return [*lines, ""]


def _short(row: Row) -> str:
    text = " ".join(row.message.split())
    return f"[{row.code}] {text[:400]}" if row.code else text[:400]
