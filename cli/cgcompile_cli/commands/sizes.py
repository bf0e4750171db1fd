"""`cgcompile sizes`: proposes capture sizes with the least padding for a log of request sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..output import count, show, table, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cgcompile.tools.capture_sizes import Proposal

BAR = 20
"""Maximum characters of a bar."""


def sizes(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="A file with one request size per line, or a CSV file; - is stdin.", show_default=False
        ),
    ],
    most: Annotated[int, typer.Option("--max", metavar="N", help="Maximum number of capture sizes.")] = 8,
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="NAME", help="The column of a CSV file that holds the sizes; may be repeated."),
    ] = None,
    multiple: Annotated[int, typer.Option("--multiple", metavar="N", help="Propose multiples of N only.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Propose capture sizes for a log of request sizes.

    The smallest capture size that holds a request serves it, with padding.
    For every number of sizes up to --max, this shows the choice that pads
    the fewest rows. With several columns, one for each dimension of the
    model, each column has its own sizes.

    \b
    cgcompile sizes requests.txt --max 8
    cgcompile sizes log.csv --column seq --multiple 8
    cgcompile sizes log.csv --column batch --column seq
    """
    from cgcompile.tools.capture_sizes import MARGIN, choose, propose, read_request_log

    names = list(dict.fromkeys(columns or ()))
    results = []
    for column, counts in zip(names or [""], read_request_log(trace, *names), strict=True):
        proposals = propose(counts, most, multiple)
        chosen = choose(proposals)
        reason = _reason(proposals, chosen, most, MARGIN)
        results.append(_ColumnResult(column=column, counts=counts, proposals=proposals, chosen=chosen, reason=reason))
    line = " ".join(["cgcompile build MODEL", *[f"--sizes {choice.option}" for choice in results]])
    if as_json:
        fields: dict[str, Any] = (
            results[0].as_json() if len(results) == 1 else {"columns": {choice.column: choice.as_json() for choice in results}}
        )
        write_json({"path": trace, "multiple": multiple, **fields, "command": line})
        return
    for choice in results:
        if choice is not results[0]:
            show("")
        choice.show()
    typer.echo(line)  # one line on any terminal, so that it can be copied


@dataclass(frozen=True, kw_only=True, slots=True)
class _ColumnResult:
    """Sizes in a column ("" for a file of lines), and the proposed capture sizes."""

    column: str
    counts: Mapping[int, int]
    proposals: Sequence[Proposal]
    chosen: Proposal
    reason: str

    @property
    def option(self) -> str:
        """The value of the option `--sizes`."""
        return f"{self.column}=" * self.column.isidentifier() + ",".join(map(str, self.chosen.sizes))

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": sum(self.counts.values()),
            "distinct": len(self.counts),
            "rows": self.chosen.served,
            "smallest": min(self.counts),
            "largest": max(self.counts),
            "proposals": [
                {"sizes": proposal.sizes, "padded": proposal.padded, "wasted_percent": proposal.wasted}
                for proposal in self.proposals
            ],
            "proposed": len(self.chosen.sizes),
            "reason": self.reason,
        }

    def show(self) -> None:
        requests = count(sum(self.counts.values()), "request")
        span = f"{count(len(self.counts), 'distinct size')} from {min(self.counts)} to {max(self.counts)}"
        served = self.chosen.served
        show(
            f"{requests}, column {self.column!r} adds up to {served}, {span}"
            if self.column
            else f"{requests} of {count(served, 'row')}, {span}"
        )
        show("")
        heads = (">number", ">padded" if self.column else ">padded rows", ">wasted", "", "sizes")
        show(table(heads, [_row(proposal, self.proposals[0].wasted) for proposal in self.proposals]))
        show("")
        show(self.reason)


def _row(proposal: Proposal, most: float) -> tuple[Any, ...]:
    bar = "#" * round(BAR * proposal.wasted / most) if most else ""
    return len(proposal.sizes), proposal.padded, f"{proposal.wasted:.1f}%", bar, ", ".join(map(str, proposal.sizes))


def _reason(proposals: Sequence[Proposal], chosen: Proposal, most: int, margin: float) -> str:
    """Explains in one line why this number of sizes was chosen."""
    number, best = len(chosen.sizes), proposals[-1]
    if chosen is not best:
        saved = f"{chosen.wasted:.1f}% wasted, {best.wasted:.1f}% with {len(best.sizes)}"
        return f"{count(number, 'size')}: the fewest within {margin:g} percentage point of the best ({saved})"
    if chosen.padded == 0:
        return f"{count(number, 'size')}: no request is padded"
    if number < most:
        return f"{count(number, 'size')}: more would save nothing"
    if number == 1:
        return "1 size: all that --max allows"
    saved = f"{proposals[-2].wasted - chosen.wasted:.1f} percentage points"
    return f"{count(number, 'size')}: all that --max allows; the last one saves {saved}, so a larger --max may be worth it"
