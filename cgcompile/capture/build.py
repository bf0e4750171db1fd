"""The cuda target's half of a build, on a machine with the GPU: capture, and lay the recordings out as files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cgbundle.format import archive
from cgbundle.format.schema import Exam, IntKey
from cgbundle.tables.module_state import encode_states

from ..bundle.emit import describe_size
from ..bundle.exam import replayed_exam, write_exam
from ..bundle.proof import accepted, measured
from ..model.source import SEED, all_keys, sample
from ..targets.build_spec import BuildSpec, ManifestParts
from ..targets.cuda.emit import cuda_target, write_recorded
from ..targets.cuda.host_regions import SplitProgram, host_stage, off_gpu, split_stage
from ..targets.cuda.ptxas import lowest_driver
from ..targets.cuda.recorded import RecordedProgram
from ..targets.memory_layout import lay_out
from ..targets.rows import WHOLE
from ..targets.weights import shapes_of
from ..transforms.error_bounds import error_bounds
from ..transforms.inlining import code_of
from ..transforms.output_aliases import with_aliases
from ..util.progress import Stages
from .processes import RecorderProcesses, recorder_processes
from .recorder import Recorded, priming, record
from .request import PRIME, RECORD, Call

STATES_FILE = "graphs/modules.bin"
EAGER = "try --lower eager; if that differs too, please report this model"
EXAM_SEED = 1
"""Seed of the exam's inputs: others than those that the graphs were captured on."""


@contextmanager
def started(keys: int, level: str, specialize: str) -> Iterator[RecorderProcesses]:
    """The processes that `build_parts` needs for so many int_keys, started before it: they are ready when the model is exported."""
    with recorder_processes() as processes:
        processes.start(RECORD, 2)
        processes.start(PRIME, priming(keys, level, specialize))
        yield processes


def build_parts(spec: BuildSpec, stage: Path, stages: Stages, processes: RecorderProcesses) -> ManifestParts:
    """Records every int_key, and writes tables, images, weights and the exam into `stage`.  Raises the refusals of `record` and
    `split_program`, and proof-failed when a replay is further from eager PyTorch than the dtype allows."""
    prepared = spec.prepared
    programs = prepared.programs
    calls = _calls(spec, SEED)
    tensors = programs.weights()
    scratch = processes.folder
    split = split_stage(programs, spec.placements, {key: call[0] for key, call in calls.items()}, stages)
    shapes = shapes_of(tensors)
    unplaced = lay_out(shapes, prepared.state, split.host_only if split else ()).rows
    hosts = host_stage(split, unplaced, scratch, stage, stages)
    with stages("record") as tell:
        recorded = record(
            programs,
            calls,
            folder=scratch / "record",
            level=spec.lower,
            specialize=spec.specialize,
            exam=_calls(spec, EXAM_SEED),
            code=code_of(spec.source, programs),
            placements=spec.placements if split else {},
            uploads=split.uploads if split else {},
            host_only=off_gpu(split, hosts, unplaced),
            written=prepared.written,
            state=prepared.state,
            exam_calls=prepared.exam_calls,
            stored=stage / archive.WEIGHTS,
            release=True,
            processes=processes,
            # what the first process of max-autotune measured and chose, the second has to find in the cache
            parallel=spec.lower != "max-autotune",
            tell=tell,
        )
        nodes = sum(len(graph.recording.nodes) for graphs in recorded.graphs.values() for graph in graphs)
        tell(f"{nodes} nodes, {len(recorded.images)} kernel images")
    with stages("emit") as tell:
        differences = {key: recorded.replays[key].differences for key in calls}
        bounds = error_bounds(prepared, recorded.weights)
        kept = accepted(spec.dimensions, bounds, differences, spec.waive, "the graph differs", EAGER)
        written = write_recorded(stage, _program(spec, recorded, split), recorded.stored, recorded.arch, split, hosts)
        if recorded.states:
            (stage / STATES_FILE).write_bytes(encode_states(recorded.states))
        rows = with_aliases(written.programs, prepared.aliases, prepared.signature.outputs, written.weights)
        replays = {key: replay.contents for key, replay in recorded.replays.items()}
        write_exam(stage / archive.EXAM, replayed_exam(rows, replays, prepared, written.weights))
        tell(describe_size(stage))
    driver = _lowest_driver(recorded)
    if written.fills:
        driver = max(driver, lowest_driver(int(recorded.arch.removeprefix("sm_"))))
    exact = split is None and all(replay.deterministic for replay in recorded.replays.values())
    return ManifestParts(
        target=cuda_target(recorded.arch, driver, hosts, spec.torch_version),
        weights=written.weights,
        memories=written.memories,
        regions=written.regions,
        programs=rows,
        module_state=STATES_FILE if recorded.states else "",
        exam=Exam(
            compare="bits" if exact else "tolerance",
            calls=prepared.exam_calls,
            expected="recording",
            bounds=kept,
            proofs=tuple([measured(key, "none", found, kept) for key, found in differences.items()]),
        ),
    )


def _calls(spec: BuildSpec, seed: int) -> dict[IntKey, Call]:
    keys = all_keys(spec.sizes)
    return {key: (sample(spec.source, dict(zip(spec.sizes, key, strict=True)), seed).tensors, {}) for key in keys}


def _program(spec: BuildSpec, recorded: Recorded, split: SplitProgram | None) -> RecordedProgram:
    """What was recorded, by region and key."""

    def names(key: IntKey) -> list[str]:
        return [region.name for region in split.partitions[key].regions if region.kind == "graph"] if split else [WHOLE]

    return RecordedProgram(
        graphs={
            (name, key): graph for key, graphs in recorded.graphs.items() for name, graph in zip(names(key), graphs, strict=True)
        },
        images=recorded.images,
        static={key: recorded.static[key] for key in all_keys(spec.sizes)},
        weights=recorded.weights,
        tables=recorded.tables,
        weights_bytes=recorded.weights_bytes,
        state_bytes=recorded.state_bytes,
    )


def _lowest_driver(recorded: Recorded) -> int:
    """The major CUDA version of the kernels' compiler (13000 = 13.0), at most the recording machine's driver.  A cubin runs on
    every driver of its major version (CUDA's minor version compatibility)."""
    toolkit = torch.version.cuda or "0"
    return min(int(toolkit.partition(".")[0]) * 1000, recorded.driver)
