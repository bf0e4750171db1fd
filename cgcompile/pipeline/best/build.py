"""Builds the cuda part of a bundle with the fastest of several lowerings for every int_key.

The weights are written once.  Every lowering is recorded (search.py) and becomes a trial bundle, which a new process replays
(trial.py).  The graphs of all lowerings are timed (timing.py).  The chosen lowerings (choice.py) are merged into one recording
(merge.py), which is emitted like any other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cgbundle.errors import CgbundleError
from cgbundle.format import file_names
from cgbundle.format.schema import IntKey, Lowering, Manifest

from ...bundle.emit import describe_size
from ...bundle.self_test import KeySelfTest, eager_self_test, on_cpu
from ...capture.build import CutProgram, cut_stage, emit, prepare_recording
from ...capture.processes import RecorderProcesses
from ...capture.recordable import Recordable
from ...model.flat_module import PREFIX
from ...offline.trace import KERNELS
from ...targets.build_spec import BuildSpec, ManifestParts, build_key
from ...targets.memory_layout import lay_out
from ...targets.weights import shapes_of, write_tables
from ...util.progress import Stages, Tell
from .candidates import Searched, reason
from .choice import LOWERINGS, choose
from .deadline import Deadline
from .merge import beside_each_other, conflicts, merged
from .search import CROSS_COMPILE, search
from .timing import time_graphs
from .traced import Traceable, traceable
from .trial import prove
from .tried_lowerings import keep_lowerings, kept_path, recall_lowerings

TRIALS = "trials"
"""The folder of trial bundles, in the bundle's folder so that they can link the file of weights.  Deleted before the bundle is
sealed."""

Lowerings = Mapping[IntKey, tuple[Lowering, ...]]
"""The tried lowerings by build key."""


def build_parts(spec: BuildSpec, stage: Path, stages: Stages, processes: RecorderProcesses) -> ManifestParts:
    """Writes tables, images, weights and the self-test of the fastest lowerings into `stage`.  If no lowering can be recorded or
    verified, raises the error of the first one."""
    deadline = Deadline(spec.options.autotune_timeout)
    cut = cut_stage(spec, processes.folder, stage, stages)
    with stages("prepare") as tell:
        cache_file = kept_path(spec)
        lowerings = recall_lowerings(cache_file, spec)
        names = _lowerings_to_record(lowerings)
        traced, expected = _cross_compile_inputs(spec, cut, tell) if CROSS_COMPILE in names else (None, {})
        recordable = prepare_recording(spec, cut, processes.folder / "record", stage, tell)
        tell.result("chosen before: " + ", ".join(names) if lowerings else f"{len(names)} lowerings to try")
    with stages("search") as tell:
        tried = search(spec, names, recordable, traced, processes, deadline, processes.folder, tell)
        processes.close()
        tell.result(_summary(tried))
    trials = stage / TRIALS
    with stages("trial") as tell:
        placed, file = _with_shared_files(tried, recordable, trials)
        proved, manifests = _proved(spec, placed, cut, expected, stage, file, tell)
        tell.result(_summary(proved))
    if lowerings is None:
        with stages("time") as tell:
            lowerings = _timed(spec, proved, manifests, trials, processes.folder)
            tell.result(_chosen(lowerings))
        if tried.complete:
            keep_lowerings(cache_file, lowerings, spec)
    shutil.rmtree(trials)
    with stages("emit") as tell:
        parts = _emitted(spec, stage, cut, tried, expected, recordable, lowerings)
        tell.result(describe_size(stage))
    return parts


def _lowerings_to_record(recalled: Lowerings | None) -> list[str]:
    """Returns the lowerings to record: all, or those that an earlier build of the same program chose."""
    if recalled is None:
        return list(LOWERINGS)
    chosen = {row.name for rows in recalled.values() for row in rows if row.chosen}
    return [name for name in LOWERINGS if name in chosen]


def _cross_compile_inputs(
    spec: BuildSpec, cut: CutProgram, tell: Tell
) -> tuple[Traceable | CgbundleError, dict[str, Sequence[KeySelfTest]]]:
    """Returns the inputs of cross-compiling, or the error that prevents it, and eager PyTorch's results by entry.  Must run before
    `prepare_recording` frees the weights."""
    tell("the program in eager PyTorch, and on the CPU")
    layout = lay_out(shapes_of(spec.programs.weights()), spec.first.state, cut.host_only, spec.first.varying)
    rows = [replace(row, name=row.name.removeprefix(PREFIX)) for row in layout.rows]
    try:
        tracing = traceable(spec, cut)
    except CgbundleError as refusal:
        return refusal, {}
    self_tests = {entry.name: eager_self_test(entry, rows) for entry in spec.entries}
    return tracing, {name: [on_cpu(self_test) for self_test in entry_tests] for name, entry_tests in self_tests.items()}


def _with_shared_files(tried: Searched, recordable: Recordable, trials: Path) -> tuple[Searched, Path]:
    """Moves the candidates' tables so that they do not overlap, and writes them to one file in `trials`.  Returns the candidates,
    and the link to the weights beside that file."""
    recorded = beside_each_other({name: trial.recorded for name, trial in tried.candidates.items()}, recordable.layout.weights_end)
    tables = {table.offset: table for recording in recorded.values() for table in recording.tables}
    trials.mkdir()
    file = trials / file_names.WEIGHTS
    os.link(recordable.request.stored, file)
    stored = recordable.stored + write_tables(trials / file_names.TABLES, [tables[offset] for offset in sorted(tables)])
    placed = {name: replace(trial, recorded=replace(recorded[name], stored=stored)) for name, trial in tried.candidates.items()}
    return replace(tried, candidates=placed), file


def _proved(
    spec: BuildSpec,
    placed: Searched,
    cut: CutProgram,
    expected: Mapping[str, Sequence[KeySelfTest]],
    stage: Path,
    file: Path,
    tell: Tell,
) -> tuple[Searched, dict[str, Manifest]]:
    """Returns the candidates whose replay passes, and the manifests of their bundles.  If none passes, raises the first error."""
    manifests: dict[str, Manifest] = {}
    refusals: dict[str, CgbundleError] = {}
    for name, candidate in placed.candidates.items():
        tell(f"replaying {name}")
        try:
            manifests[name] = prove(spec, candidate, cut, expected, stage, file, file.parent / name)
        except CgbundleError as refusal:
            refusals[name] = refusal
    if not manifests:
        raise next(iter(refusals.values()))
    return _without(placed, refusals), manifests


def _timed(
    spec: BuildSpec, proved: Searched, manifests: Mapping[str, Manifest], trials: Path, folder: Path
) -> dict[IntKey, tuple[Lowering, ...]]:
    """Times the lowerings of every key and marks the chosen one.  If none can be timed, raises the first error."""
    needs = {name: sum(size for _, size in manifest.memories) for name, manifest in manifests.items()}
    timed = time_graphs({name: trials / name for name in manifests}, needs, torch.cuda.mem_get_info()[0], folder)
    if not timed.times:
        raise next(iter(timed.failed.values()))
    remaining = _without(proved, timed.failed)
    times = {
        build_key(spec, number, key): {name: graph_times[entry.name, key] for name, graph_times in timed.times.items()}
        for number, entry in enumerate(spec.entries)
        for key in entry.keys
    }
    chosen = choose(times, conflicts({name: trial.recorded for name, trial in remaining.candidates.items()}))
    return {
        key: tuple(
            [
                Lowering(
                    name=name, chosen=name == chosen[key], microseconds=tuple([round(time, 3) for time in by_name.get(name, ())]),
                    reason=remaining.left_out.get(name, ""),
                )
                for name in LOWERINGS
            ]
        )
        for key, by_name in times.items()
        if any(by_name.values())  # a key without GPU graphs has no times
    }  # fmt: skip


def _emitted(
    spec: BuildSpec,
    stage: Path,
    cut: CutProgram,
    tried: Searched,
    expected: Mapping[str, Sequence[KeySelfTest]],
    recordable: Recordable,
    lowerings: Lowerings,
) -> ManifestParts:
    """Writes the bundle's files from the chosen lowerings.  Returns the manifest's rows."""
    chosen = {key: next(row.name for row in rows if row.chosen) for key, rows in lowerings.items()}
    used = {name: trial for name, trial in tried.candidates.items() if name in chosen.values()} or dict(
        [next(iter(tried.candidates.items()))]
    )
    recorded = merged(
        beside_each_other({name: trial.recorded for name, trial in used.items()}, recordable.layout.weights_end), chosen
    )
    stored = recordable.stored + write_tables(stage / file_names.TABLES, recorded.tables)
    folded = {name for trial in used.values() for name in trial.folded}
    parts = emit(spec, stage, replace(recorded, stored=stored), cut, folded=folded, expected=expected)
    if CROSS_COMPILE in used:
        rows = [row for row in json.loads(used[CROSS_COMPILE].configurations) if row["image"] in recorded.images]
        (stage / KERNELS).write_text(json.dumps(rows, indent=0) + "\n")
    entries = [
        replace(
            part, programs=tuple([replace(row, lowerings=lowerings.get(build_key(spec, n, row.key), ())) for row in part.programs])
        )
        for n, part in enumerate(parts.entries)
    ]
    return replace(parts, entries=tuple(entries))


def _without(searched: Searched, refusals: Mapping[str, CgbundleError]) -> Searched:
    remaining = {name: trial for name, trial in searched.candidates.items() if name not in refusals}
    reasons = {name: reason(refusal) for name, refusal in refusals.items()}
    return replace(searched, candidates=remaining, left_out={**searched.left_out, **reasons})


def _summary(tried: Searched) -> str:
    return ", ".join([*tried.candidates, *[f"not {name}" for name in tried.left_out]])


def _chosen(lowerings: Lowerings) -> str:
    """Says for how many int_keys each lowering was chosen."""
    names = [row.name for rows in lowerings.values() for row in rows if row.chosen]
    return ", ".join([f"{name} for {names.count(name)} of {len(names)}" for name in LOWERINGS if name in names])
