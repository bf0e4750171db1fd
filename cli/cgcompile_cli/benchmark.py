"""Shows a benchmark as tables: cold starts, calls, memory, and whether the outputs are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from cgcompile.tools.bench.report import FIRST, Benchmark, ratio
from cgcompile.tools.generation.measure import GenerationBenchmark

from .output import count, record, safe, shortened, show, size, table

NONE = "-"
"""A cell without a value."""

RATES = {"requests": "request_throughput", "tokens made": "output_throughput", "tokens read and made": "total_token_throughput"}
LATENCIES = {
    "ttft": "to the first token", "tpot": "for each later token", "itl": "between two pieces of a stream", "e2el": "to the end",
}  # fmt: skip

TITLES = {
    "call": "call: time of one call, warm",
    "device": "call on the GPU: its own clock, calls back to back",
    "dispatch": "dispatch: CPU time of a call",
}


def show_benchmark(report: Benchmark) -> None:
    """Writes all tables; nothing if the bundle was not measured."""
    if not report.bundle.starts:
        return
    show(record(head(report)))
    _part("cold start: process start to first output, then to all int_keys ready; seconds", cold(report))
    for kind in report.kinds():
        if report.bundle.timings:
            _part(TITLES[kind], calls(report, kind))
    if report.bundle.memory:
        _part("memory of the process, every int_key ready", memory(report))
    show("")
    skipped = [(result.name, result.why) for result in report.ways if result.why]
    show(record([*skipped, *([("outputs", verdict)] if (verdict := outputs(report)) else []), *report.notes]))


def _part(title: str, heads_rows: tuple[Sequence[str], Sequence[Sequence[object]]]) -> None:
    from rich.text import Text

    show("")
    show(Text(safe(title), "bold"))
    show(table(*heads_rows))


def head(report: Benchmark) -> list[tuple[str, str]]:
    """Returns (name, text) of the bundle, the int_keys, the machine, the versions and the date."""
    machine = report.machine
    chip = f"{machine.processor}, {count(machine.cores, 'core')}, load average {machine.load:.1f}"
    gpu = f"{machine.gpu}, CUDA driver {machine.driver // 1000}.{machine.driver % 1000 // 10}; " if machine.gpu else ""
    shown, hidden = shortened(report.names)
    selection = f" ({len(report.keys)} of {report.recorded})" if len(report.keys) < report.recorded else ""
    more = f", and {hidden} more" if hidden else ""
    return [
        ("bundle", f"{report.name}, {report.target}, {count(report.rounds, 'round')}, medians; ratio = baseline / bundle"),
        ("int_keys", f"{'; '.join(shown)}{more}{selection}"),
        ("machine", f"{gpu}{chip}"),
        ("with", ", ".join([f"{name} {version}" for name, version in machine.versions])),
        ("date", machine.date),
    ]


def cold(report: Benchmark) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Returns (heads, rows) of the cold starts."""
    rows = []
    for result in report.ways:
        if not result.starts:
            continue
        firsts = result.firsts()
        spread = f"{number(min(firsts))}-{number(max(firsts))}" if len(firsts) > 1 else "once"
        phases = [number(result.phase(index)) for index in range(len(FIRST))]
        rows.append([
            result.name, _ratio(ratio(firsts, report.bundle.firsts())), number(median(firsts)), spread, *phases,
            number(median(result.readies())),
        ])  # fmt: skip
    return ("", ">ratio", ">first", ">min-max", *[f">{phase}" for phase in FIRST], ">ready"), rows


def calls(report: Benchmark, what: str) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Returns (heads, rows) of the calls of one kind, by int_key."""
    rows = []
    for key, name in zip(report.keys, report.names, strict=True):
        base = report.bundle.timing(what, key)
        for result in report.ways:
            measurement = result.timing(what, key)
            if measurement is None:
                continue
            seconds = measurement.seconds
            least = precise(min(seconds)) if len(seconds) > 1 else NONE
            most = precise(max(seconds)) if len(seconds) > 1 else NONE
            shown = name if result is report.bundle else ""
            ratio_text = _ratio(ratio(seconds, base.seconds if base else ()))
            rows.append([shown, result.name, ratio_text, precise(median(seconds)), least, most])
    return ("int_key", "", ">ratio", ">median", ">min", ">max"), rows


def memory(report: Benchmark) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Returns (heads, rows) of the memory."""
    base = report.bundle.memory
    gpu = any(result.memory is not None and result.memory.device >= 0 for result in report.ways)
    rows = []
    for result in report.ways:
        used = result.memory
        if used is None or base is None:
            continue
        ours, theirs = (base.device, used.device) if gpu else (base.resident, used.resident)
        device = [size(used.device) if used.device >= 0 else NONE] if gpu else []
        rows.append([
            result.name, _ratio(theirs / ours if ours > 0 and theirs >= 0 else None), *device, size(used.resident), size(used.own),
        ])  # fmt: skip
    return ("", ">ratio", *([">GPU, beside the context"] if gpu else []), ">resident", ">of it unshared"), rows


def show_generation(report: GenerationBenchmark) -> None:
    """Writes the tables of `--generate`."""
    machine, ours = report.machine, report.ways[0]
    show(record([
        ("bundle", f"{report.name}, {report.target}, {count(report.rounds, 'round')}; ratio = bundle / baseline, in tokens/s"),
        ("tokens", f"{report.tokens} tokens after prompts of {report.prompt} tokens, greedy"),
        ("machine", f"{machine.processor}, {count(machine.cores, 'core')}, load average {machine.load:.1f}"),
        ("with", ", ".join([f"{name} {version}" for name, version in machine.versions])),
        ("date", machine.date),
    ]))  # fmt: skip
    measured = [result for result in report.ways if result.firsts]
    rows = [[result.name, number(median(result.firsts)), number(median(result.seconds))] for result in measured]
    _part("process start to the first token, and to the second, one lane; seconds, medians", (("", ">first", ">second"), rows))
    rates = [
        [
            lanes if result is ours else "",
            result.name,
            f"{dict(result.rates)[lanes]:.0f}",
            _ratio(dict(ours.rates)[lanes] / dict(result.rates)[lanes]),
        ]
        for lanes in report.batches
        for result in measured
    ]
    _part("tokens a second, all lanes together, the best", ((">lanes", "", ">tokens/s", ">ratio"), rates))
    show("")
    skipped = [(result.name, result.why) for result in report.ways if result.why]
    equal_tokens = [
        (result.name, f"the first {result.same(ours)} of {len(ours.made)} tokens are the bundle's")
        for result in measured
        if result is not ours
    ]
    show(record([*skipped, *equal_tokens]))


def show_load(numbers: Mapping[str, Any]) -> None:
    """Writes the tables of a load test."""
    rates = [(f"{name} a second", f"{numbers[field]:.1f}") for name, field in RATES.items()]
    completed = f"{numbers['completed']} of {count(numbers['num_prompts'], 'request')} in {numbers['duration']:.1f} s"
    show(record([("model", numbers["model_id"]), ("answered", completed), *rates]))
    rows = [
        [text, *[f"{numbers[f'{kind}_{name}_ms']:.1f}" for kind in ("mean", "median", "p99")]] for name, text in LATENCIES.items()
    ]
    _part("milliseconds", (("", ">mean", ">median", ">p99"), rows))


def outputs(report: Benchmark) -> str:
    """Returns a text that says whether all outputs are right, "" if none were compared."""
    wrong, compared = report.wrong(), [(error, result) for result in report.ways for error in result.errors]
    if wrong:
        return f"WRONG in {count(len(wrong), 'comparison')} of {len(compared)}"
    if not compared:
        return ""
    worst, result = max(compared, key=lambda pair: pair[0].error)
    allowed = f"allowed {worst.allowed:.1e}" if worst.allowed else "the same bits"
    return f"right for all; largest error {worst.error:.1e} ({result.name}; {allowed})"


# --- numbers ----------------------------------------------------------------------------------------------------------


def _ratio(value: float | None) -> str:
    return NONE if value is None else digits(value)


def digits(value: float) -> str:
    """Formats with three digits: `2.72`, `14.4`, `102`."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def number(seconds: float) -> str:
    """Formats as `digits`, but with three decimals below 1: `0.288`."""
    return f"{seconds:.3f}" if seconds < 1 else digits(seconds)


def precise(seconds: float) -> str:
    """Formats with three digits and the unit, `31.2 us`."""
    scale, unit = next((pair for pair in ((1e6, "us"), (1e3, "ms")) if seconds * pair[0] < 1000), (1, "s"))
    return f"{digits(seconds * scale)} {unit}"
