"""Measures a CUDA bundle on this machine's GPU, beside torch and JAX, and prints all tables.

    PYTHONPATH=.:cli:bundles python tests/bench/gpu/show.py --json show.json
    PYTHONPATH=.:cli:bundles python tests/bench/gpu/show.py --only cold,dispatch

Parts: builds and architectures (which models build, and whether a new process gives the same bits), cold (process start to first
output), dispatch (CPU time of a call), device (GPU time of a call), memory, replays.  Every measurement is a new process; one that
fails is a row with its error.  Exit status 1 if something failed or is wrong; times do not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.builds import build_table, built_models
from tests.bench.common import child_rows, children, report
from tests.bench.common.child_rows import failed, say
from tests.bench.gpu import tables
from tests.bench.gpu_cold import cold_start

BUILDS = {"builds", "architectures"}
PARTS = ("builds", "architectures", "cold", "dispatch", "device", "memory", "replays")
LEAK_ROUNDS, REPLAYS = 100, 10_000


def main() -> int:
    """Runs the parts and prints their tables. Writes the JSON after each part."""
    options = arguments()
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    screen = report.console()
    screen.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}\n")
    numbers: dict[str, Any] = {}
    wrong: list[str] = []
    rows = build_rows(cache, options) if BUILDS & set(options.only) else []
    for part in options.only:
        say(f"part {part}")
        numbers[part], sentences = measure(part, cache, rows, screen)
        wrong += [f"{part}: {sentence}" for sentence in sentences]
        if options.json:
            options.json.write_text(json.dumps({**numbers, "wrong": wrong}, indent=1) + "\n")
    say("done")
    for sentence in wrong:
        print(f"gpu_show: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=children.ROOT / ".cache" / "gpu", help="folder of bundles and caches")
    parser.add_argument("--json", type=Path, help="also write every number there, after each part")
    parser.add_argument("--jobs", type=int, default=5, help="builds at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no build later than this after the first")
    parser.add_argument("--models", help="only these models and architectures, by name, with commas")
    parser.add_argument("--levels", default=",".join(built_models.LEVELS), help="levels that are built (default: %(default)s)")
    options = parser.parse_args()
    options.only, options.levels = options.only.split(","), options.levels.split(",")
    options.models = options.models.split(",") if options.models else list(built_models.BY_NAME)
    for name, names, known in (
        ("only", options.only, PARTS),
        ("levels", options.levels, built_models.LEVELS),
        ("models", options.models, built_models.BY_NAME),
    ):
        if set(names) - set(known):
            parser.error(f"--{name}: expected names among {', '.join(known)}")
    return options


def measure(part: str, cache: Path, rows: list[dict[str, Any]], screen: report.Console) -> tuple[Any, list[str]]:
    """Measures a part and prints its tables. Returns (its numbers, sentences about failures); `rows` are those of all builds."""
    if part in BUILDS:
        return builds(part, rows, screen)
    bundle, why = build_table.needed(built_models.GPT, "inductor", cache)
    if bundle is None:
        return {"error": why}, [why]
    if part == "cold":
        numbers = cold_start.measure(bundle, cache)
        cold_start.show(screen, numbers)
        return numbers, tables.wrong_cold(numbers)
    numbers = measure_child(part, bundle, cache)
    if why := failed(numbers):
        return numbers, [why]
    tables.SHOW[part](screen, numbers)
    return numbers, tables.WRONG[part](numbers)


def measure_child(part: str, bundle: Path, cache: Path) -> dict[str, Any]:
    """Runs the child of a part and returns its numbers."""
    model = built_models.GPT.source
    extra = child_rows.inductor_cache(cache) | child_rows.gpt_environment()
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        "dispatch": lambda: child_rows.run("gpu/dispatch.py", model, bundle, extra=extra),
        "device": lambda: child_rows.run("gpu/device_time.py", model, bundle, extra=extra),
        "memory": lambda: child_rows.run("gpu/memory_use.py", bundle, LEAK_ROUNDS),
        "replays": lambda: child_rows.run("gpu/replays.py", model, bundle, REPLAYS, extra=extra),
    }
    return variants[part]()


def build_rows(cache: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Builds the models of both build tables together and returns their rows."""
    listed = [model for part in PARTS if part in options.only for model in LISTED.get(part, ())]
    models = [model for model in listed if model.name in options.models]
    alone = models[:1] == [built_models.GPT] and bool(set(options.only) - BUILDS)
    return build_table.build_all(models, cache, options.jobs, options.levels, alone, options.seconds)


LISTED = {"builds": built_models.MODELS, "architectures": built_models.ARCHITECTURES}


def builds(part: str, all_rows: list[dict[str, Any]], screen: report.Console) -> tuple[Any, list[str]]:
    """Prints one of the two build tables. A model whose package is missing is skipped and not wrong."""
    names = {model.name for model in LISTED[part]}
    rows = [row for row in all_rows if row["name"] in names]
    title = "Models" if part == "builds" else "Architectures of transformers, two layers, random weights"
    build_table.show(screen, title, rows)
    broken = [row for row in rows if failed(row) and not failed(row).startswith("skipped")]
    return rows, [f"{row['name']} {row['level']}: {failed(row)}" for row in broken]


if __name__ == "__main__":
    sys.exit(main())
