"""Compares the two verdicts on a case, and prints the table of all cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .case import Case
from .cgcompile_says import Verdict, cgcompile_says
from .pytorch_says import Flag
from .recorded import pytorch_said

AGREE, STRICTER, LOOSER = "agree", "stricter", "looser"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A case with both verdicts.

    `outcome`: "looser" if cgcompile misses a flag of PyTorch, "stricter" if only cgcompile flags the case, "agree" otherwise.
    """

    case: Case
    ours: Verdict
    theirs: tuple[Flag, ...]

    @property
    def missed(self) -> tuple[Flag, ...]:
        """The flags of PyTorch that cgcompile does not cover."""
        return tuple([flag for flag in self.theirs if not self._covers(flag)])

    def _covers(self, flag: Flag) -> bool:
        """A flag of PyTorch with lines is covered if cgcompile flags one of these lines. A flag without lines is covered if
        cgcompile flags anything. An export error of cgcompile covers every flag."""
        return bool(self.ours.lines & flag.lines) if flag.lines and not self.ours.error else self.ours.flagged

    @property
    def outcome(self) -> str:
        if self.missed:
            return LOOSER
        return STRICTER if self.ours.flagged and not self.theirs else AGREE


def compare(case: Case) -> Row:
    """Returns both verdicts. cgcompile traces the model; PyTorch's verdict is read from the record if that is valid."""
    return Row(case=case, ours=cgcompile_says(case), theirs=pytorch_said(case))


def table(rows: Sequence[Row], differences: Mapping[str, str]) -> str:
    """Returns the table as plain text: numbers of models, agreements and differences, and every difference with its reason."""
    kinds = list(dict.fromkeys([row.case.kind for row in rows]))
    lines = [f"{'kind':<16}{'models':>8}{'both flag':>11}{'both pass':>11}{'stricter':>10}{'looser':>8}"]
    for kind in [*kinds, "all"]:
        chosen = [row for row in rows if kind in (row.case.kind, "all")]
        count = Counter([row.outcome for row in chosen])
        both = sum(row.outcome == AGREE and row.ours.flagged for row in chosen)
        lines.append(f"{kind:<16}{len(chosen):>8}{both:>11}{count[AGREE] - both:>11}{count[STRICTER]:>10}{count[LOOSER]:>8}")
    differing = [row for row in rows if row.outcome != AGREE]
    lines += ["", f"{len(rows)} models, {len(rows) - len(differing)} agreements, {len(differing)} differences"]
    for row in differing:
        lines += ["", f"{row.case.name}: {row.outcome} than PyTorch", f"    {differences.get(row.case.name, 'NOT LISTED')}"]
        lines += [f"    PyTorch, {flag.by}: {flag.reason}" for flag in dict.fromkeys(row.missed)]
    return "\n".join(lines)
