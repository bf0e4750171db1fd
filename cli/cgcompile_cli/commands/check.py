"""`cgcompile check`: reports what prevents graphs, and the regions that a build would make.  Builds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FINDINGS
from ..options import (
    AdapterRank,
    Adapters,
    AnyTarget,
    Chunk,
    Context,
    Dtype,
    FallbackOps,
    Lanes,
    MaxPaths,
    ModelName,
    Weights,
    chosen_by_default,
)
from ..output import count, listed, record, safe, show, size, write_json
from ..progress import watching

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cgbundle.format.schema import Finding
    from cgcompile.pipeline.check import Report

MEANING = {"refuse": "no bundle can be built", "host": "runs on the host between graphs", "note": "for information"}
COLOURS = {"refuse": "bold red", "host": "yellow", "note": "dim"}

PER_SIZE = "every int_key has a program and code of its own: a build takes longer, and the bundle is larger"

BRANCH, ONE_WAY = "data-dependent-branch", " of the path that the example inputs took"
"""The rule of a data-dependent branch or loop, and a text about the regions of a model with such a finding."""

OPERATIONS = 8
"""Maximum operators of a region that are listed."""


def check(
    model: ModelName,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--sizes", metavar="SIZES", help="Sizes to check: 1,8,32; by dimension batch=1,8; by entry decode:batch=1,8."),
    ] = None,
    context: Context = None,
    lanes: Lanes = None,
    chunk: Chunk = None,
    dtype: Dtype = None,
    weights: Weights = None,
    adapters: Adapters = None,
    adapter_rank: AdapterRank = None,
    target: AnyTarget = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse models with operations that cannot be in a graph.")] = False,
    fallback_ops: FallbackOps = None,
    train: Annotated[bool, typer.Option("--train", help="Keep a model in training mode instead of calling eval().")] = False,
    max_paths: MaxPaths = 64,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Report operations of a model that a CUDA graph cannot replay.

    Show every finding with its line in your code, its effect and a fix, and
    the regions that a build would make. This builds nothing and needs no
    GPU. Exit status 1 if a finding refuses a build. Without --target the
    target is that of `build`: the GPU of this machine, or its CPU if it has
    no GPU.

    \b
    cgcompile check gpt.py --sizes 1,8,32
    cgcompile check gpt.py --sizes 1,8,32 --target cuda
    """
    import cgcompile

    with watching(quiet) as progress:
        report = cgcompile.check(
            model, sizes=list(sizes or ()), target=target, strict=strict, fallback_ops=tuple(fallback_ops or ()), train=train,
            max_paths=max_paths, context=context, lanes=lanes or (),
            chunk=chunk or (), dtype=dtype, weights=weights, adapters=adapters or 0,
            adapter_rank=adapter_rank, progress=progress or "silent",
        )  # fmt: skip
    if as_json:
        write_json(asdict(report) | {"refused": report.refused})
    else:
        for entry_report in report.reports:
            show(_head(entry_report, many=bool(report.others), assumed=target == "auto"))
            for group in grouped(entry_report.findings):
                show(_finding(group))
            show(_regions(entry_report))
    if report.refused:
        raise typer.Exit(FINDINGS)


def grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Groups findings with the same rule, line and message, for example of a layer that is called twelve times."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        place = (finding.severity, finding.where) if finding.where else (finding.node,)
        key = (finding.rule, *place, finding.message)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _head(report: Report, *, many: bool, assumed: bool) -> RenderableType:
    target = chosen_by_default(report.target) if assumed else f"for {report.target}"
    sizes = ", ".join([f"{name} {listed(values)}" for name, values in report.sizes]) or "no dimensions"
    example = f" (assumed: name yours with --sizes {report.assumed[0]}=...)" if report.assumed else ""
    axes = [f"{name}: {where}" for name, where in report.axes]
    return record([
        *([("", "")] if many else []),
        ("model", f"{report.name}, {target}{f'; {report.mode}' if report.mode else ''}"),
        *([("entry", report.entry)] if many else []),
        ("sizes", [sizes + example, *axes]),
        *([("exported", [f"per size: {report.per_size}", PER_SIZE])] if report.per_size else []),
        ("findings", _summary(report)),
    ])  # fmt: skip


def _summary(report: Report) -> str:
    if not report.findings:
        return "none"
    groups = grouped(report.findings)
    counts = [(severity, sum(group[0].severity == severity for group in groups)) for severity in MEANING]
    return ", ".join([
        f"{number} {severity}{'s' if severity == 'note' and number > 1 else ''} ({MEANING[severity]})"
        for severity, number in counts if number
    ])  # fmt: skip


def _finding(group: Sequence[Finding]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    first = group[0]
    times = f", {len(group)} times" if len(group) > 1 else ""
    where = f"  {safe(first.where)}" if first.where else ""
    head = Text.assemble("\n", (first.severity, COLOURS[first.severity]), " ", (first.rule, "bold"), where)
    fields = [("", first.source), ("what", f"{first.message}{times}"), ("effect", first.effect), ("fix", first.fix)]
    return Group(head, Padding(record([(name, text) for name, text in fields if text]), (0, 0, 0, 2)))


# --- the partition ------------------------------------------------------------------------------------------------


def _regions(report: Report) -> RenderableType:
    from rich.text import Text
    from rich.tree import Tree

    if report.target == "cpu":
        return Text("\nthe target is the CPU, which has no CUDA graphs, so there are no host regions")
    if report.unpartitioned:
        return Text(f"\nno regions: {safe(report.unpartitioned)}")
    graphs = sum(region.kind == "graph" for region in report.regions)
    hosts = len(report.regions) - graphs
    names = ", ".join([f"{name}={values[-1]}" for name, values in report.sizes])
    counted = Text.assemble("\n", (f"{count(graphs, 'graph')}, {count(hosts, 'host region')}", "bold"))
    tree = Tree(counted.append(ONE_WAY if any(finding.rule == BRANCH for finding in report.findings) else ""))
    for region in report.regions:
        colour = "green" if region.kind == "graph" else "yellow"
        about = f" {region.name}, {count(sum(calls for _, calls in region.operations), 'operation')}"
        reason = f": {safe(region.reason)}" if region.reason else ""
        branch = tree.add(Text.assemble((region.kind, colour), about, reason))
        branch.add(Text(f"reads {_values(region.reads, names)}"))
        if region.operations:
            calls = [f"{name} x{number}" if number > 1 else name for name, number in region.operations]
            branch.add(Text(safe(listed(calls, OPERATIONS))))
    tree.add(Text(f"returns {_values(report.returned, names)}"))
    return tree


def _values(crossing: Sequence[tuple[str, Any]], names: str) -> str:
    """Formats values: `2 values, 1.5 KiB at batch=8: x, relu`."""
    if not crossing:
        return "nothing"
    at_sizes = f" at {names}" if names else ""
    total = sum(number for _, number in crossing)
    return f"{count(len(crossing), 'value')}, {size(total)}{at_sizes}: {safe(listed([name for name, _ in crossing], OPERATIONS))}"
