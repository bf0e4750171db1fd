"""Compares a bundle with eager PyTorch and torch.compile: cold start, one call, memory of several servers.  `make bench`.

    python tests/bench/cpu/compare.py --repeat 5 --json bench.json

Everything runs in new processes on this machine, one after the other; the variants alternate.  The page cache and torch.compile's
cache are warm.  Exit status 1 if an output differs from eager PyTorch, or if a server imported torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.bench.common import children, report
from tests.bench.common.cases import CASES, MINILM, MLP, bundle, inputs
from tests.bench.cpu import cold_start, shared_pages

SERVERS = 4


def main() -> int:
    """Measures the requested parts and prints them. Returns 1 if an output is wrong."""
    options = arguments()
    options.cache.mkdir(parents=True, exist_ok=True)
    cache = options.cache.resolve()
    try:
        numbers, wrong = measure(options, cache)
    except children.ChildFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    for sentence in wrong:
        print(f"bench: WRONG: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cache", type=Path, default=children.ROOT / ".cache" / "bench", help="folder of bundles and torch.compile's cache"
    )
    parser.add_argument(
        "--models", default="gpt,minilm", help="models of the cold start, by name, with commas (default: %(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="measured repetitions (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every number there")
    parser.add_argument("--only", choices=("cold", "calls", "sharing"), help="one of the three measurements")
    options = parser.parse_args()
    unknown = set(options.models.split(",")) - set(CASES)
    if unknown or options.repeat < 1:
        parser.error(f"--models: expected names among {', '.join(CASES)}; --repeat: expected 1 or more")
    return options


def measure(options: argparse.Namespace, cache: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns (all numbers, sentences about wrong outputs)."""
    screen = report.console()
    models = [CASES[name] for name in options.models.split(",")] if options.only in (None, "cold") else []
    also = [case for part, case in (("calls", MLP), ("sharing", MINILM)) if options.only in (None, part)]
    bundles = {case.name: bundle(case, cache) for case in dict.fromkeys([*models, *also])}
    numbers: dict[str, Any] = {"load average": os.getloadavg()[0], "cores": os.cpu_count()}
    screen.print(f"{os.cpu_count()} cores, load average before measuring {os.getloadavg()[0]:.2f}\n")
    wrong: list[str] = []
    if options.only in (None, "cold"):
        results = []
        for case in models:
            results.append(cold_start.measure(case, bundles[case.name], inputs(case, cache), cache, options.repeat, say))
            wrong += results[-1].wrong()
            wrong += [f"{case.name}: torch in the serving process" for run in results[-1].runs["bundle"] if run["torch"]]
        numbers["cold"] = {
            one.case.name: {"runs": one.runs, "errors": one.errors, "cold compile": one.cold_compile} for one in results
        }
        print_cold(screen, results)
    if options.only in (None, "calls"):
        say("mlp: calls")
        (text,) = inputs(MLP, cache)
        numbers["calls"] = children.run("cpu/time_calls.py", bundles[MLP.name], text)
        print_calls(screen, numbers["calls"])
    if options.only in (None, "sharing"):
        say(f"minilm: {SERVERS} servers")
        built = bundles[MINILM.name]
        numbers["sharing"] = shared_pages.measure(built, inputs(MINILM, cache), SERVERS)
        print_sharing(screen, numbers["sharing"], (built / shared_pages.WEIGHTS).stat().st_size)
    return numbers, wrong


def say(text: str) -> None:
    """Prints progress on one line of a terminal's standard error."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text} ...", end="", file=sys.stderr, flush=True)


def print_cold(screen: report.Console, results: list[cold_start.Measured]) -> None:
    """Prints ratios, times, and the parts of the bundle's time."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    names = [one.case.name for one in results]
    strongest = [one.ratio(one.fastest_eager) for one in results]
    rows = [
        ["faster than torch.compile, warm cache", *[report.goal(one.ratio("compile"), 6, "x", at_least=True) for one in results]],
        ["faster than import torch and eager", *[report.goal(one.ratio("eager"), 4, "x", at_least=True) for one in results]],
        ["faster than eager without initialization", *[f"{ratio:.1f} x" for ratio in strongest]],
        ["bundle", *[report.spread(one.seconds("bundle")) for one in results]],
        ["bundle, without NumPy", *[report.spread(one.seconds("without NumPy")) for one in results]],
        ["import torch, eager", *[report.spread(one.seconds("eager")) for one in results]],
        ["import torch, eager, no initialization", *[report.spread(one.seconds(one.fastest_eager)) for one in results]],
        ["torch.compile, warm cache", *[report.spread(one.seconds("compile")) for one in results]],
        ["torch.compile, empty cache (once)", *[f"{one.cold_compile:.3f} s" for one in results]],
        ["largest difference to eager", *[f"{max(one.errors.values()):.1e}" for one in results]],
    ]
    title = "Cold start: from process start to first output"
    report.table(screen, title, ["median (smallest-largest)", *names], rows)

    parts = [one.parts() for one in results]
    rows = [[name, *[report.milliseconds(part[name]) for part in parts]] for name in cold_start.PARTS if name != "ours"]
    ours = [statistics.median(part["ours"]) * 1e3 for part in parts]
    imports = [statistics.median([run["laps"]["import cgbundle"] for run in one.runs["bundle"]]) * 1e3 for one in results]
    foreign = [", ".join(one.runs["without NumPy"][0]["foreign"]) or "none" for one in results]
    rows += [
        ["ours: load and call, without libtorch and the model", *[report.goal(value, 60, "ms") for value in ours]],
        ["import cgbundle, unwatched", *[report.goal(value, 30, "ms") for value in imports]],
        ["imported beside the standard library", *foreign],
    ]
    report.table(screen, "Where the bundle's time goes", ["median (smallest-largest)", *names], rows)


def print_calls(screen: report.Console, timings: dict[str, Any]) -> None:
    """Prints the time that cgbundle adds to the run of the shared object."""
    bare = timings["quartiles"]["bare"][1]
    rows = []
    for variant, title in (
        ("bare", "the shared object's own run"),
        ("copy", 'program(x), outputs="copy"'),
        ("view", 'program(x), outputs="view"'),
    ):
        low, median, high = timings["quartiles"][variant]
        added = "" if variant == "bare" else report.goal(median - bare, 20, "us")
        rows.append([title, f"{median:.1f} us ({low:.1f}-{high:.1f})", added])
    title = f"One call: examples/mlp.py, batch 1, {timings['calls']} calls each"
    report.table(screen, title, ["", "median (quartiles)", "ours adds"], rows)


def print_sharing(screen: report.Console, servers: list[dict[str, shared_pages.Pages]], size: int) -> None:
    """Prints the pages of the weights in each server, and the memory of all servers together."""
    shown = ("Rss", "Pss", "Shared_Clean", "Private_Clean", "Private_Dirty")
    rows = []
    for index, one in enumerate(servers):
        rows.append(
            [
                f"server {index + 1}",
                *[report.mebibytes(one["weights"][name]) for name in shown],
                report.mebibytes(one["process"]["Pss"]),
            ]
        )
    total = [sum(one["weights"][name] for one in servers) for name in shown]
    rows.append(["together", *map(report.mebibytes, total), report.mebibytes(sum(one["process"]["Pss"] for one in servers))])
    title = f"Weights of minilm ({report.mebibytes(size // 1024)} on disk) in {len(servers)} servers at once"
    note = "Pss divides a page by the number of processes that map it: its sum is what the pages really take."
    report.table(screen, title, ["", *[name.replace("_", " ").lower() for name in shown], "whole process, pss"], rows, note)


if __name__ == "__main__":
    sys.exit(main())
