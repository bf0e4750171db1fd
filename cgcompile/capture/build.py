"""The cuda target's half of a build, on a machine with the GPU: capture, and lay the recordings out as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from cgbundle.format import archive
from cgbundle.format.schema import Exam, IntKey
from cgbundle.tables.module_state import encode_states

from ..bundle.emit import describe_size
from ..bundle.exam import KeyExam, replayed_exam, write_exam
from ..bundle.proof import accepted, measured
from ..model.source import SEED, sample
from ..targets.build_spec import BuildSpec, EntryParts, EntrySpec, ManifestParts
from ..targets.cuda.chains import chained_outputs
from ..targets.cuda.conditions import conditional_driver
from ..targets.cuda.emit import Written, cuda_target, write_recorded
from ..targets.cuda.host_regions import SplitProgram, host_stage, off_gpu, split_stage
from ..targets.cuda.ptxas import lowest_driver
from ..targets.cuda.recorded import RecordedProgram
from ..targets.memory_layout import lay_out
from ..targets.rows import WHOLE
from ..targets.weights import fixed_weights, shapes_of
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
    programs, state = spec.programs, spec.entries[0].prepared.state
    prepared = spec.by_key({entry.name: dict.fromkeys(entry.keys, entry.prepared) for entry in spec.entries})
    placements = spec.by_key({entry.name: entry.placements for entry in spec.entries})
    calls = _calls(spec, SEED)
    tensors = programs.weights()
    scratch = processes.folder
    split = split_stage(programs, placements, {key: call[0] for key, call in calls.items()}, stages)
    shapes = shapes_of(tensors)
    unplaced = lay_out(shapes, state, split.host_only if split else ()).rows
    hosts = host_stage(split, unplaced, scratch, stage, stages)
    with stages("record") as tell:
        recorded = record(
            programs,
            calls,
            folder=scratch / "record",
            level=spec.lower,
            specialize=spec.specialize,
            exam=_calls(spec, EXAM_SEED),
            code=code_of(spec.entries[0].source, programs),
            placements=placements if split else {},
            uploads=split.uploads if split else {},
            host_only=off_gpu(split, hosts, unplaced),
            written={key: own.written for key, own in prepared.items()},
            chained=chained_outputs(spec, split),
            state=state,
            exam_calls={key: own.exam_calls for key, own in prepared.items()},
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
        written = write_recorded(stage, _program(calls, recorded, split), recorded.stored, recorded.arch, split, hosts)
        if recorded.states:
            (stage / STATES_FILE).write_bytes(encode_states(recorded.states))
        parts = [_entry_parts(spec, number, recorded, written, exact=split is None) for number in range(len(spec.entries))]
        write_exam(stage / archive.EXAM, {entry.name: exam for entry, (_, exam) in zip(spec.entries, parts, strict=True)})
        tell(describe_size(stage))
    driver = max(_lowest_driver(recorded), conditional_driver(written.recordings.values()))
    if written.fills:
        driver = max(driver, lowest_driver(int(recorded.arch.removeprefix("sm_"))))
    return ManifestParts(
        target=cuda_target(recorded.arch, driver, hosts, spec.torch_version),
        weights=written.weights,
        fixed=fixed_weights(stage, written.weights, programs, hosts.unbound),
        memories=written.memories,
        regions=written.regions,
        module_state=STATES_FILE if recorded.states else "",
        entries=tuple([part for part, _ in parts]),
        reserved=recorded.reserved,
    )


def _entry_parts(
    spec: BuildSpec, number: int, recorded: Recorded, written: Written, *, exact: bool
) -> tuple[EntryParts, list[KeyExam]]:
    """The rows of entry number `number`, and its exam.  `exact`: no host computes a part of it.  Raises proof-failed."""
    entry = spec.entries[number]
    prepared, replays = entry.prepared, spec.own(number, recorded.replays)
    differences = {key: replays[key].differences for key in entry.keys}
    kept = accepted(
        entry.dimensions, error_bounds(prepared, recorded.weights), differences, spec.waive, "the graph differs", EAGER, entry.name
    )
    own = spec.own(number, dict(zip(spec.programs.by_key, written.programs, strict=True)))
    rows = with_aliases(tuple(own.values()), prepared.aliases, prepared.signature.outputs, written.weights)
    exam = Exam(
        compare="bits" if exact and all(replay.deterministic for replay in replays.values()) else "tolerance",
        calls=prepared.exam_calls,
        expected="recording",
        bounds=kept,
        proofs=tuple([measured(key, "none", found, kept) for key, found in differences.items()]),
    )
    contents = {key: replay.contents for key, replay in replays.items()}
    return EntryParts(programs=rows, exam=exam), replayed_exam(rows, contents, prepared, written.weights)


def _calls(spec: BuildSpec, seed: int) -> dict[IntKey, Call]:
    """A call of every build key."""

    def drawn(entry: EntrySpec, key: IntKey) -> Call:
        return sample(entry.source, dict(zip(entry.sizes, key, strict=True)), seed).tensors, {}

    return spec.by_key({entry.name: {key: drawn(entry, key) for key in entry.keys} for entry in spec.entries})


def _program(calls: Mapping[IntKey, Call], recorded: Recorded, split: SplitProgram | None) -> RecordedProgram:
    """What was recorded, by region and build key, these in the order of `calls`."""

    def names(key: IntKey) -> list[str]:
        return [region.name for region in split.partitions[key].regions if region.kind == "graph"] if split else [WHOLE]

    return RecordedProgram(
        graphs={
            (name, key): graph for key, graphs in recorded.graphs.items() for name, graph in zip(names(key), graphs, strict=True)
        },
        images=recorded.images,
        static={key: recorded.static[key] for key in calls},
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
