"""`cgcompile sizes`: the capture sizes that waste the least padding on a trace of request sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..output import count, show, table, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgcompile.tools.capture_sizes import Proposal

BAR = 20
"""Characters of the longest bar."""


def sizes(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="A file with one request size per line, or a CSV file; - is stdin.", show_default=False
        ),
    ],
    most: Annotated[int, typer.Option("--max", metavar="N", help="The largest number of capture sizes.")] = 8,
    column: Annotated[
        str | None,
        typer.Option("--column", metavar="NAME", help="The column of a CSV file that holds the sizes."),
    ] = None,
    multiple: Annotated[int, typer.Option("--multiple", metavar="N", help="Propose multiples of N only.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Propose capture sizes for a trace of request sizes.

    A request is served by the smallest capture size that holds it, and the
    rest is padding. For every number of sizes up to --max, shows the choice
    that pads the fewest rows.

    \b
    cgcompile sizes requests.txt --max 8
    cgcompile sizes log.csv --column seq --multiple 8
    """
    from cgcompile.tools.capture_sizes import MARGIN, choose, propose, read_request_log

    counts = read_request_log(trace, column)
    proposals = propose(counts, most, multiple)
    chosen = choose(proposals)
    dimension = f"{column}=" if column and column.isidentifier() else ""
    line = f"cgcompile build MODEL --sizes {dimension}{','.join(map(str, chosen.sizes))}"
    why = _reason(proposals, chosen, most, MARGIN)
    if as_json:
        write_json({
            "path": trace,
            "requests": sum(counts.values()),
            "distinct": len(counts),
            "rows": chosen.served,
            "smallest": min(counts),
            "largest": max(counts),
            "multiple": multiple,
            "proposals": [{"sizes": each.sizes, "padded": each.padded, "wasted_percent": each.wasted} for each in proposals],
            "proposed": len(chosen.sizes),
            "reason": why,
            "command": line,
        })  # fmt: skip
        return
    span = f"{count(len(counts), 'distinct size')} from {min(counts)} to {max(counts)}"
    requests = count(sum(counts.values()), "request")
    show(
        f"{requests}, column {column!r} adds up to {chosen.served}, {span}"
        if column
        else f"{requests} of {count(chosen.served, 'row')}, {span}"
    )
    show("")
    heads = (">number", ">padded" if column else ">padded rows", ">wasted", "", "sizes")
    show(table(heads, [_row(proposal, proposals[0].wasted) for proposal in proposals]))
    show("")
    show(why)
    typer.echo(line)  # one line on any terminal: it is there to be copied


def _row(proposal: Proposal, most: float) -> tuple[Any, ...]:
    bar = "#" * round(BAR * proposal.wasted / most) if most else ""
    return len(proposal.sizes), proposal.padded, f"{proposal.wasted:.1f}%", bar, ", ".join(map(str, proposal.sizes))


def _reason(proposals: Sequence[Proposal], chosen: Proposal, most: int, margin: float) -> str:
    """Why this number: one line."""
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
