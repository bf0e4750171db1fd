"""The cuda target's part of a build on a machine with a GPU: captures the graphs and writes the recordings as files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from cgbundle.format import file_names
from cgbundle.format.schema import IntKey, SelfTest
from cgcompile.bundle.recordings import encode_states

from ..bundle.emit import describe_size
from ..bundle.proof import accepted, measured, unproved
from ..bundle.self_test import KeySelfTest, replayed_self_test, write_self_test
from ..bundle.single_region import WHOLE
from ..model.source import SEED, SELF_TEST_SEED
from ..targets.build_spec import BuildSpec, EntryParts, ManifestParts
from ..targets.cuda.donations import donated_outputs
from ..targets.cuda.emit import Written, cuda_target, write_recorded
from ..targets.cuda.host_regions import HostRegions, SplitProgram, host_stage, off_gpu, split_stage
from ..targets.cuda.recorded import RecordedProgram
from ..targets.kernels.graph_driver import graph_driver
from ..targets.kernels.ptxas import lowest_driver
from ..targets.memory_layout import lay_out
from ..targets.weights import frozen_weights, shapes_of, write_tables
from ..transforms.error_bounds import error_bounds, selection_floor
from ..transforms.inlining import code_of
from ..transforms.near_ties.judge import indices_text
from ..transforms.output_aliases import with_aliases
from ..util.progress import Stages, Tell
from .processes import RecorderProcesses
from .recordable import Recordable, prepare
from .recorder import Recorded, priming, record_level
from .request import PRIME, RECORD, Call

STATES_FILE = "graphs/modules.bin"
EAGER = "try --lower eager; if that differs too, please report this model"


def start(processes: RecorderProcesses, keys: int, level: str, specialize: str) -> None:
    """Starts the processes that record `keys` int_keys at a level.  Call it early: to create a CUDA context takes a second."""
    processes.start(RECORD, 2)
    processes.start(PRIME, priming(keys, level, specialize))


def build_parts(spec: BuildSpec, stage: Path, stages: Stages, processes: RecorderProcesses) -> ManifestParts:
    """Records every int_key, and writes tables, images, weights and the self-test into `stage`.  Raises what `record` and
    `split_program` raise, and proof-failed when a replay differs from eager PyTorch by more than the dtype allows."""
    cut = cut_stage(spec, processes.folder, stage, stages)
    with stages("record") as tell:
        recordable = prepare_recording(spec, cut, processes.folder / "record", stage, tell)
        recorded = record_level(recordable, spec.options.lower, processes, tell=tell)
        processes.close()  # CPU time and memory of children are counted only after they ended
        recorded = replace(recorded, stored=recorded.stored + write_tables(stage / file_names.TABLES, recorded.tables))
        tell.result("; ".join([counted(recorded), *_indices(spec, recorded)]))
    with stages("emit") as tell:
        parts = emit(spec, stage, recorded, cut)
        tell.result(describe_size(stage))
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProgram:
    """A program's regions.  Without host regions `split` is None and `hosts` is NO_HOST_REGIONS.  `host_only`: see `off_gpu`."""

    split: SplitProgram | None
    hosts: HostRegions
    host_only: frozenset[str]


def cut_stage(spec: BuildSpec, scratch: Path, stage: Path, stages: Stages) -> CutProgram:
    """Splits the programs into regions if parts must run on the host.  Compiles the host regions into `stage`."""
    split = split_stage(spec.programs, spec.placements, spec.calls(), stages)
    shapes, host_only = shapes_of(spec.programs.weights()), split.host_only if split else ()
    unplaced = lay_out(shapes, spec.first.state, host_only, spec.first.varying).rows
    hosts = host_stage(split, unplaced, scratch, stage, stages)
    return CutProgram(split=split, hosts=hosts, host_only=off_gpu(split, hosts, unplaced))


def prepare_recording(spec: BuildSpec, cut: CutProgram, folder: Path, stage: Path, tell: Tell) -> Recordable:
    """Calls `prepare` for all entries: writes the weights into `stage`, other files into `folder`, and frees the weights' GPU
    memory.  Raises what `prepare` does."""
    programs, split = spec.programs, cut.split
    prepared = spec.entry_by_key()
    return prepare(
        programs,
        example_calls(spec),
        folder=folder,
        specialize=spec.options.specialize,
        self_test=example_calls(spec, SELF_TEST_SEED),
        code=code_of(spec.first.source, programs),
        placements=spec.placements if split else {},
        uploads=split.uploads if split else {},
        host_only=cut.host_only,
        written={key: preparation.written for key, preparation in prepared.items()},
        donated=donated_outputs(spec, split),
        state=spec.first.state,
        varying=spec.first.varying,
        bounds=lambda rows: {key: error_bounds(preparation, rows) for key, preparation in prepared.items()},
        floors={key: selection_floor(preparation, error_bounds(preparation)) for key, preparation in prepared.items()},
        self_test_calls={key: preparation.self_test_calls for key, preparation in prepared.items()},
        stored=stage / file_names.WEIGHTS,
        release=True,
        tell=tell,
    )


def _indices(spec: BuildSpec, recorded: Recorded) -> list[str]:
    """Returns a text for every entry whose graphs select other indices than eager PyTorch, with their number."""
    texts = []
    for number, entry in enumerate(spec.entries):
        replays = spec.of_entry(number, recorded.replays).values()
        texts.append(indices_text(error_bounds(entry, recorded.weights), [replay.indices for replay in replays]))
    return [text for text in texts if text]


def counted(recorded: Recorded) -> str:
    """Returns the numbers of nodes and kernel images as text."""
    nodes = sum(len(graph.recording.nodes) for graphs in recorded.graphs.values() for graph in graphs)
    return f"{nodes} nodes, {len(recorded.images)} kernel images"


def emit(
    spec: BuildSpec,
    stage: Path,
    recorded: Recorded,
    cut: CutProgram,
    *,
    folded: Collection[str] = (),
    expected: Mapping[str, Sequence[KeySelfTest]] = MappingProxyType({}),
) -> ManifestParts:
    """Writes tables, images and the self-test into `stage`, which contains the weights already.

    `folded`: weights from which constants of the recordings were computed.  `expected`: by entry, outputs of eager PyTorch.  They
    are the self-test of entries with an int_key that was not captured.  Raises proof-failed.
    """
    written = write_recorded(stage, _program(spec, recorded, cut.split), recorded.stored, recorded.arch, cut.split, cut.hosts)
    if recorded.states:
        (stage / STATES_FILE).write_bytes(encode_states(recorded.states))
    parts = [
        _entry_parts(spec, number, recorded, written, expected.get(entry.name, ()), exact=cut.split is None)
        for number, entry in enumerate(spec.entries)
    ]
    write_self_test(
        stage / file_names.SELF_TEST, {entry.name: self_test for entry, (_, self_test) in zip(spec.entries, parts, strict=True)}
    )
    driver = max(_lowest_driver(recorded), graph_driver(written.recordings.values()))
    if written.fills or recorded.graphs.keys() - recorded.replays.keys():  # the build's ptxas compiled some images
        driver = max(driver, lowest_driver(int(recorded.arch.removeprefix("sm_"))))
    return ManifestParts(
        target=cuda_target(recorded.arch, driver, cut.hosts, spec.torch_version),
        weights=written.weights,
        frozen=frozen_weights(stage, written.weights, spec.programs, {*folded, *cut.hosts.unbound}, spec.baked),
        memories=written.memories,
        regions=written.regions,
        module_state=STATES_FILE if recorded.states else "",
        entries=tuple([part for part, _ in parts]),
        donated=recorded.reserved,
    )


def _entry_parts(
    spec: BuildSpec, number: int, recorded: Recorded, written: Written, expected: Sequence[KeySelfTest], *, exact: bool
) -> tuple[EntryParts, list[KeySelfTest]]:
    """Returns the manifest parts of entry `number`, and its self-test.  `exact`: it has no host regions.  Raises proof-failed."""
    entry = spec.entries[number]
    prepared, replays = entry, spec.of_entry(number, recorded.replays)
    entry_programs = spec.of_entry(number, dict(zip(spec.programs.by_key, written.programs, strict=True)))
    rows = with_aliases(tuple(entry_programs.values()), prepared.aliases, prepared.signature.outputs, written.weights)
    if len(replays) < len(entry_programs):
        bounds = error_bounds(prepared, written.weights)
        self_test = SelfTest(
            compare="tolerance", calls=prepared.self_test_calls, expected="eager", bounds=tuple([limit.bound for limit in bounds]),
            proofs=tuple([unproved(key, bounds) for key in entry_programs]),
        )  # fmt: skip
        return EntryParts(programs=rows, self_test=self_test), list(expected)
    differences = {key: replays[key].differences for key in entry.keys}
    bounds = error_bounds(prepared, recorded.weights)
    accepted_bounds = accepted(entry.dimensions, bounds, differences, spec.options.allow, "the graph differs", EAGER, entry.name)
    self_test = SelfTest(
        compare="bits" if exact and all(replay.deterministic for replay in replays.values()) else "tolerance",
        calls=prepared.self_test_calls,
        expected="recording",
        bounds=accepted_bounds,
        proofs=tuple([measured(key, "none", diffs, accepted_bounds) for key, diffs in differences.items()]),
    )
    contents = {key: replay.contents for key, replay in replays.items()}
    return EntryParts(programs=rows, self_test=self_test), replayed_self_test(rows, contents, prepared, written.weights)


def example_calls(spec: BuildSpec, seed: int = SEED) -> dict[IntKey, Call]:
    """Returns the example call of every build key, on which its graphs are captured."""
    return {key: (tensors, {}) for key, tensors in spec.calls(seed).items()}


def _program(spec: BuildSpec, recorded: Recorded, split: SplitProgram | None) -> RecordedProgram:
    """Returns the recordings by region and build key, with the keys in the bundle's order."""
    return RecordedProgram(
        graphs={
            (name, key): graph
            for key, graphs in recorded.graphs.items()
            for name, graph in zip(graph_names(split, key), graphs, strict=True)
        },
        images=recorded.images,
        static={key: recorded.static[key] for key in spec.programs.by_key},
        weights=recorded.weights,
        tables=recorded.tables,
        weights_bytes=recorded.weights_bytes,
        state_bytes=recorded.state_bytes,
    )


def graph_names(split: SplitProgram | None, key: IntKey) -> list[str]:
    """Returns the names of a key's graph regions, in execution order."""
    return [region.name for region in split.partitions[key].regions if region.kind == "graph"] if split else [WHOLE]


def _lowest_driver(recorded: Recorded) -> int:
    """Returns the oldest CUDA version that can run the cubins (13000 = 13.0), at most that of the recording machine's driver.
    A cubin runs on every driver of its major version (CUDA's minor version compatibility)."""
    toolkit = torch.version.cuda or "0"
    return min(int(toolkit.partition(".")[0]) * 1000, recorded.driver)
