"""`cgcompile bench`: a bundle beside eager PyTorch, torch.compile, CUDA graphs captured by hand and ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import INTERRUPTED, UsageError
from ..output import complain, count, record, safe, shortened, show, size, table, write_json

if TYPE_CHECKING:
    from cgcompile.tools.bench.report import Report

WRONG = 1
"""Exit status where outputs are not the model's."""

NONE = "-"
"""A cell without a value."""

TITLES = {
    "call": "call: time of one call, warm",
    "device": "call on the GPU: its own clock, calls back to back",
    "dispatch": "dispatch: what a call keeps the CPU",
}


def bench(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle's directory.", show_default=False)],
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="PEERS", help="Of eager, compile, compile-warm, manual, ort. Default: all.", show_default=False
        ),
    ] = "",
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="KEY",
            help="Measure this int_key: 8, or 8x128; may be repeated. Default: all, or 4 of many.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Fresh processes per peer, and turns of calls.")] = 5,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Let PyTorch run this model.py instead of the bundle's own program.",
            show_default=False,
        ),
    ] = "",
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - for stdout.", show_default=False)
    ] = "",
    plot: Annotated[str, typer.Option("--plot", metavar="FILE", help="Draw the medians as an SVG file.", show_default=False)] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure a bundle beside other ways to serve its model.

    Cold start by phases, time of a call, memory: every cold start is a fresh
    process, peers take turns, and all outputs are compared with those that
    the build stored. Peers run the program that the bundle carries. A peer
    that fails has a row that says why. Exit status 1 where outputs are wrong.

    \b
    cgcompile bench gpt.cgb
    cgcompile bench gpt.cgb --against eager,compile --model gpt.py
    """
    from cgbundle.format import archive
    from cgbundle.validate import bundle as verify
    from cgcompile.tools.bench import measure, svg

    from .. import int_keys as keys
    from .build import watching

    manifest = archive.read_manifest(bundle)
    verify.check_manifest(manifest)
    for path in (json_file, plot):
        _check_writable(path)
    with watching(quiet) as progress:
        report = measure(
            bundle,
            against=[name for name in against.replace(",", " ").split()],
            keys=[keys.parse(manifest, text) for text in sizes or ()],
            rounds=rounds,
            model=model,
            progress=progress,
        )
    if plot and report.bundle.starts:
        with open(plot, "w", encoding="utf-8") as file:
            file.write(svg(report))
    if json_file == "-":
        write_json(report.plain())
    else:
        if json_file:
            _write_json(json_file, report)
        _show(report)
    wrong = report.wrong()
    for sentence in wrong:
        complain(f"wrong outputs: {sentence}", "")
    if report.interrupted:
        complain("interrupted: what was measured by then is above" if report.bundle.starts else "interrupted", "")
        raise typer.Exit(INTERRUPTED)
    if wrong:
        raise typer.Exit(WRONG)


def _check_writable(path: str) -> None:
    """Before minutes of measuring, not after."""
    folder = os.path.dirname(os.path.abspath(path))
    if path and path != "-" and (os.path.isdir(path) or not os.access(folder, os.W_OK)):
        raise UsageError(f"{path}: cannot be written", "name a file in a folder that exists")


def _write_json(path: str, report: Report) -> None:
    import json

    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(report.plain(), indent=2, allow_nan=False) + "\n")


# --- the tables -------------------------------------------------------------------------------------------------------


def _show(report: Report) -> None:
    if not report.bundle.starts:
        return
    show(record(head(report)))
    _part("cold start: process start to first output, then to all int_keys ready; seconds", cold(report))
    for what in report.whats():
        if report.bundle.timings:
            _part(TITLES[what], calls(report, what))
    if report.bundle.memory:
        _part("memory of the process, every int_key ready", memory(report))
    show("")
    left = [(peer.name, peer.why) for peer in report.peers if peer.why]
    show(record([*left, *([("outputs", said)] if (said := outputs(report)) else []), *report.notes]))


def _part(title: str, found: tuple[Sequence[str], Sequence[Sequence[object]]]) -> None:
    from rich.text import Text

    show("")
    show(Text(safe(title), "bold"))
    show(table(*found))


def head(report: Report) -> list[tuple[str, str]]:
    """What was measured, where and when."""
    machine = report.machine
    chip = f"{machine.processor}, {count(machine.cores, 'core')}, load average {machine.load:.1f}"
    gpu = f"{machine.gpu}, CUDA driver {machine.driver // 1000}.{machine.driver % 1000 // 10}; " if machine.gpu else ""
    shown, hidden = shortened(report.names)
    some = f" ({len(report.keys)} of {report.recorded})" if len(report.keys) < report.recorded else ""
    rest = f", and {hidden} more" if hidden else ""
    return [
        ("bundle", f"{report.name}, {report.target}, {count(report.rounds, 'round')}, medians; ratio = peer / bundle"),
        ("int_keys", f"{'; '.join(shown)}{rest}{some}"),
        ("machine", f"{gpu}{chip}"),
        ("with", ", ".join([f"{name} {version}" for name, version in machine.versions])),
        ("date", machine.date),
    ]


def cold(report: Report) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """(heads, rows) of the cold starts."""
    from cgcompile.tools.bench.report import FIRST, ratio

    rows = []
    for peer in report.peers:
        if not peer.starts:
            continue
        firsts = peer.firsts()
        spread = f"{number(min(firsts))}-{number(max(firsts))}" if len(firsts) > 1 else "once"
        phases = [number(peer.phase(index)) for index in range(len(FIRST))]
        rows.append([
            peer.name, times(ratio(firsts, report.bundle.firsts())), number(median(firsts)), spread, *phases,
            number(median(peer.readies())),
        ])  # fmt: skip
    return ("", ">ratio", ">first", ">min-max", *[f">{phase}" for phase in FIRST], ">ready"), rows


def calls(report: Report, what: str) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """(heads, rows) of the calls of one kind, by int_key."""
    from cgcompile.tools.bench.report import ratio

    rows = []
    for key, name in zip(report.keys, report.names, strict=True):
        base = report.bundle.timing(what, key)
        for peer in report.peers:
            found = peer.timing(what, key)
            if found is None:
                continue
            seconds = found.seconds
            low, high = precise(min(seconds), median(seconds)), precise(max(seconds), median(seconds))
            spread = f"{low.split()[0]}-{high.split()[0]}" if len(seconds) > 1 else NONE
            shown = name if peer is report.bundle else ""
            rows.append([shown, peer.name, times(ratio(seconds, base.seconds if base else ())), precise(median(seconds)), spread])
    return ("int_key", "", ">ratio", ">median", ">min-max"), rows


def memory(report: Report) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """(heads, rows) of the memory."""
    base = report.bundle.memory
    gpu = any(peer.memory is not None and peer.memory.device >= 0 for peer in report.peers)
    rows = []
    for peer in report.peers:
        used = peer.memory
        if used is None or base is None:
            continue
        ours, theirs = (base.device, used.device) if gpu else (base.resident, used.resident)
        device = [size(used.device) if used.device >= 0 else NONE] if gpu else []
        rows.append([
            peer.name, times(theirs / ours if ours > 0 and theirs >= 0 else None), *device, size(used.resident), size(used.own),
        ])  # fmt: skip
    return ("", ">ratio", *([">GPU, beside the context"] if gpu else []), ">resident", ">of it unshared"), rows


def outputs(report: Report) -> str:
    """What is to be said of the outputs of everybody, "" where none was compared."""
    wrong, compared = report.wrong(), [(each, peer) for peer in report.peers for each in peer.errors]
    if wrong:
        return f"WRONG in {count(len(wrong), 'comparison')} of {len(compared)}"
    if not compared:
        return ""
    worst, peer = max(compared, key=lambda pair: pair[0].error)
    allowed = f"allowed {worst.allowed:.1e}" if worst.allowed else "the same bits"
    return f"right for all; largest error {worst.error:.1e} ({peer.name}; {allowed})"


# --- numbers ----------------------------------------------------------------------------------------------------------


def number(seconds: float) -> str:
    """Three digits: `0.288`, `2.72`, `14.4`, `102`."""
    if seconds < 1:
        return f"{seconds:.3f}"
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def times(value: float | None) -> str:
    """`1.00`, `9.41`, `31.9`, `120`; a dash for none."""
    if value is None:
        return NONE
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def precise(seconds: float, like: float | None = None) -> str:
    """Three digits and the unit, `31.2 us`, in that of `like`."""
    scale, unit = next(
        (pair for pair in ((1e6, "us"), (1e3, "ms")) if (seconds if like is None else like) * pair[0] < 1000), (1, "s")
    )
    value = seconds * scale
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
