"""`--autotune` without a GPU: recorders, proofs and times are fakes, everything else is real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cgcompile
from cgbundle.format import file_names
from cgbundle.format.schema import MEMORIES, DonatedRange, Manifest, Value
from cgbundle.validate.module_state import Address, ModuleState, Relocation
from cgcompile.bundle import recordings as codec
from cgcompile.bundle.recordings import MemcpyNode, Recording
from cgcompile.bundle.self_test import ReplayedBytes
from cgcompile.capture import build as capture_build
from cgcompile.capture import processes as capture_processes
from cgcompile.capture.recordable import Recordable
from cgcompile.capture.recorder import Recorded, Replay
from cgcompile.errors import BuildError, ModelError
from cgcompile.offline.trace import KERNELS
from cgcompile.pipeline import argument_checks
from cgcompile.pipeline import build as pipeline_build
from cgcompile.pipeline.best import build as best
from cgcompile.pipeline.best import search, trial, tried_lowerings
from cgcompile.pipeline.best.candidates import Candidate
from cgcompile.pipeline.best.merge import beside_each_other, conflicts, merged
from cgcompile.pipeline.best.timing import Timed
from cgcompile.targets.cuda.recorded import RecordedGraph
from cgcompile.targets.memory_layout import PAD, Table, align
from cgcompile.util.scratch import scratch_folder
from cgcompile.util.tolerance import Difference
from tests.helpers.raising import raises

WEIGHTS, INPUTS, ARENA = (MEMORIES.index(name) for name in ("weights", "inputs", "arena"))
SIZES, WIDTH = [1, 4], 8


def recorded(recordable: Recordable, name: str, **changes: Any) -> Recorded:
    """Returns recordings that copy the input to the arena, at an offset that depends on `name`. A table with this name as contents
    follows the weights."""
    layout, graphs, replays = recordable.layout, {}, {}
    target = 256 * len(name)
    for key in recordable.request.keys:
        size = 4 * WIDTH * key[0]
        copy = MemcpyNode(
            source=Address(memory=INPUTS, offset=0), target=Address(memory=ARENA, offset=target), width=size, height=1, depth=1,
            source_pitch=size, source_height=1, target_pitch=size, target_height=1,
        )  # fmt: skip
        operand, result = [
            Value(dtype="float32", shape=(key[0], WIDTH), strides=(WIDTH, 1), memory=memory, offset=offset)
            for memory, offset in (("inputs", 0), ("arena", target))
        ]
        recording = Recording(key=key, functions=(), nodes=(copy,), edges=())
        arena = target + align(size) + PAD
        graphs[key] = (RecordedGraph(recording=recording, inputs=(operand,), outputs=(result,), arena=arena),)
        contents = ReplayedBytes(inputs=recordable.inputs[key], outputs=recordable.inputs[key], mutated=(), state=())
        replays[key] = Replay(contents=contents, deterministic=True, differences=(Difference(error=0.0, text=""),))
    tables = (Table(offset=layout.weights_end, contents=name.encode()),)
    result = Recorded(
        graphs=graphs, static={key: size + PAD for key, size in recordable.static.items()}, replays=replays, weights=layout.rows,
        stored=recordable.stored, tables=tables, weights_bytes=layout.weights_end + align(len(name)) + PAD, state_bytes=0,
        states=(), reserved=(), images={}, arch="sm_90", driver=13000,
    )  # fmt: skip
    return replace(result, **changes)


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Sets the results of the fake recorders, proof and timer by the name of the lowering: an error, or microseconds by key."""
    said = SimpleNamespace(refused={}, unproved={}, untimed={}, times={}, recorded=[], timed=0)

    @contextmanager
    def recorder_processes(folder: Path | None = None) -> Iterator[Any]:
        with scratch_folder() as scratch:
            yield SimpleNamespace(
                folder=folder or scratch, cache=tmp_path / "compilers", others=recorder_processes,
                end=lambda role: None, stop=lambda: None, close=lambda: None,
            )  # fmt: skip

    def record_level(recordable: Recordable, name: str, running: Any, tell: Callable[[str], None]) -> Recorded:
        said.recorded.append(name)
        if name in said.refused:
            raise said.refused[name]
        return recorded(recordable, name)

    def trace(
        spec: Any, what: Any, recordable: Recordable, folder: Path, tell: Callable[[str], None], seconds: float | None
    ) -> Candidate:
        recording = record_level(recordable, "cross-compile", None, tell)
        rows = [{"image": "gone", "symbol": "x", "configuration": "", "chosen": "only"}]
        return Candidate(recorded=replace(recording, replays={}), folded=frozenset(), configurations=json.dumps(rows))

    def replay(stage: Path, manifest: Manifest, bounds: object, allow: object) -> None:
        assert {file.name for file in stage.iterdir()} >= {file_names.MANIFEST, file_names.WEIGHTS, file_names.SELF_TEST, "graphs"}
        if stage.name in said.unproved:
            raise said.unproved[stage.name]

    def time_graphs(bundles: Mapping[str, Path], needs: Mapping[str, int], free: int, folder: Path) -> Timed:
        said.timed += 1
        assert min(needs.values()) > 0
        times = {
            name: {("forward", (size,)): (said.times[name][size],) for size in SIZES}
            for name in bundles
            if name not in said.untimed
        }
        return Timed(times=times, failed={name: said.untimed[name] for name in bundles if name in said.untimed})

    chosen = SimpleNamespace(target="sm_90", recorder="capture", runs_here=False, device=torch.device("cpu"))
    monkeypatch.setattr(pipeline_build, "choose", lambda *arguments, **options: chosen)
    monkeypatch.setattr(argument_checks, "choose", lambda *args, **options: chosen)
    monkeypatch.setattr(argument_checks, "check_packages", lambda recorder: None)
    monkeypatch.setattr(capture_processes, "recorder_processes", recorder_processes)
    monkeypatch.setattr(capture_build, "start", lambda *parameters: None)
    monkeypatch.setattr(search, "record_level", record_level)
    monkeypatch.setattr(search, "start", lambda *settings: None)
    monkeypatch.setattr(search, "trace", trace)
    monkeypatch.setattr(trial, "replay", replay)
    monkeypatch.setattr(best, "time_graphs", time_graphs)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 36, 1 << 36))
    gpu = SimpleNamespace(name="a GPU", multi_processor_count=1, total_memory=1)
    monkeypatch.setattr(tried_lowerings.torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    said.times = {name: {1: 10.0, 4: 20.0} for name in ("eager", "inductor", "cross-compile", "max-autotune")}
    return said


def build(out: Path, **options: Any) -> cgcompile.Built:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.full((WIDTH,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    return cgcompile.build(Twice(), lambda batch: torch.randn(batch, WIDTH), sizes=SIZES, out=out, autotune=True, **options)


def chosen(built: cgcompile.Built) -> list[str]:
    return [row.name for program in built.manifest.entries[0].programs for row in program.lowerings if row.chosen]


def test_the_fastest_of_each_int_key_is_in_the_bundle_and_the_times_of_all(scenario: SimpleNamespace, tmp_path: Path) -> None:
    scenario.times |= {"eager": {1: 4.0, 4: 30.0}, "max-autotune": {1: 8.0, 4: 15.0}}
    bundle = build(tmp_path / "a.cgb")
    assert chosen(bundle) == ["eager", "max-autotune"]
    assert bundle.manifest.entries[0].self_test.expected == "recording" and bundle.manifest.entries[0].self_test.compare == "bits"
    for program, name in zip(bundle.manifest.entries[0].programs, chosen(bundle), strict=True):
        table = codec.decode((bundle.path / program.steps[0].file).read_bytes())
        assert table.nodes[0].target.offset == 256 * len(name), "the graph is that of the lowering"
        assert {row.name: row.microseconds for row in program.lowerings} == {
            lowering: (times[program.key[0]],) for lowering, times in scenario.times.items()
        }
    tables = [row for row in bundle.manifest.weights if row.name.startswith("cgcompile.table")]
    assert [row.shape for row in tables] == [(len("eager"),), (len("max-autotune"),)], "the tables of the others are gone"
    assert not (bundle.path / KERNELS).exists() and not (bundle.path / best.TRIALS).exists()


def test_a_traced_int_key_is_held_to_eager_pytorch(scenario: SimpleNamespace, tmp_path: Path) -> None:
    scenario.times["cross-compile"] = {1: 1.0, 4: 99.0}
    bundle = build(tmp_path / "a.cgb")
    assert chosen(bundle) == ["cross-compile", "eager"]
    assert (bundle.manifest.entries[0].self_test.expected, bundle.manifest.entries[0].self_test.compare) == ("eager", "tolerance")
    assert json.loads((bundle.path / KERNELS).read_text()) == [], "of kernels that the bundle has"


def test_what_was_chosen_before_is_recorded_without_a_search(scenario: SimpleNamespace, tmp_path: Path) -> None:
    scenario.times["max-autotune"] = {1: 1.0, 4: 1.0}
    first = build(tmp_path / "a.cgb")
    scenario.recorded.clear()
    again = build(tmp_path / "b.cgb")
    assert scenario.recorded == ["max-autotune"] and scenario.timed == 1
    assert [row.lowerings for row in again.manifest.entries[0].programs] == [
        row.lowerings for row in first.manifest.entries[0].programs
    ]


def test_one_that_cannot_be_recorded_proved_or_timed_is_left_out_and_says_why(scenario: SimpleNamespace, tmp_path: Path) -> None:
    scenario.refused["max-autotune"] = ModelError("lowering-failed", "no kernel")
    scenario.unproved["cross-compile"] = BuildError("proof-failed", "it differs")
    scenario.untimed["eager"] = BuildError("recorder-failed", "the process ended (log: /tmp/x/record0.log)")
    bundle = build(tmp_path / "a.cgb")
    assert chosen(bundle) == ["inductor"] * 2
    reasons = {row.name: row.reason for row in bundle.manifest.entries[0].programs[0].lowerings}
    assert reasons == {"eager": "the process ended", "inductor": "", "cross-compile": "it differs", "max-autotune": "no kernel"}


@pytest.mark.parametrize("stage", ["refused", "unproved", "untimed"])
def test_where_none_is_left_the_build_fails_with_the_firsts_reason(scenario: SimpleNamespace, tmp_path: Path, stage: str) -> None:
    names = ("eager", "cross-compile", "max-autotune", "inductor")
    getattr(scenario, stage).update({name: BuildError("proof-failed", f"not {name}") for name in names})
    with raises("proof-failed", match="not inductor"):
        build(tmp_path / "a.cgb")
    assert not (tmp_path / "a.cgb").exists()


def test_when_the_time_is_over_what_is_there_is_chosen_from_and_nothing_kept(scenario: SimpleNamespace, tmp_path: Path) -> None:
    bundle = build(tmp_path / "a.cgb", autotune_timeout=1e-9)
    reasons = {row.name: row.reason for row in bundle.manifest.entries[0].programs[0].lowerings}
    late = "not recorded in the 1e-09 seconds that the search may take"
    assert chosen(bundle) == ["inductor"] * 2 and reasons["eager"] == reasons["max-autotune"] == late
    build(tmp_path / "b.cgb")
    assert scenario.recorded.count("max-autotune") == 1, "the second build searches"


def test_seconds_of_a_search_that_is_none(tmp_path: Path) -> None:
    layer = torch.nn.ReLU()
    with raises("limit-invalid", match="autotune_timeout is 5 seconds, and nothing is autotuned"):
        cgcompile.build(layer, lambda: torch.ones(2), out=tmp_path / "a.cgb", target="cpu", autotune_timeout=5)
    with raises("limit-invalid", match="autotune_timeout is 0"):
        cgcompile.build(layer, lambda: torch.ones(2), out=tmp_path / "a.cgb", target="cuda", autotune=True, autotune_timeout=0)


@pytest.mark.parametrize(
    ("target", "text"), [("cpu", "the cpu target has one lowering"), ("sm_80", "cannot run kernels, so it cannot time them")]
)
def test_where_nothing_can_be_timed_autotune_is_refused(tmp_path: Path, target: str, text: str) -> None:
    with raises("target-unavailable", match=f"autotune: .*{text}"):
        cgcompile.build(torch.nn.ReLU(), lambda: torch.ones(2), out=tmp_path / "a.cgb", target=target, autotune=True)


# --- recordings that are merged -----------------------------------------------------------------------------------


def made_up(tables: Sequence[Table] = (), reserved: Sequence[DonatedRange] = (), at: Sequence[tuple[int, int]] = ()) -> Recorded:
    """Returns a recording of one key whose only node copies between two addresses."""
    source, target = [Address(memory=memory, offset=offset) for memory, offset in at or ((INPUTS, 0), (ARENA, 0))]
    copy = MemcpyNode(
        source=source, target=target, width=4, height=1, depth=1, source_pitch=4, source_height=1, target_pitch=4, target_height=1
    )
    output = Value(dtype="float32", shape=(1,), strides=(1,), memory=MEMORIES[target.memory], offset=target.offset)
    graph = RecordedGraph(
        recording=Recording(key=(1,), functions=(), nodes=(copy,), edges=()), inputs=(), outputs=(output,), arena=4096
    )
    end = max([align(table.offset + len(table.contents)) for table in tables], default=1024)
    return Recorded(
        graphs={(1,): (graph,)}, static={(1,): 512}, replays={}, weights=(), stored=(), tables=tuple(tables),
        weights_bytes=end + PAD, state_bytes=0, states=(), reserved=tuple(reserved), images={}, arch="sm_90", driver=13000,
    )  # fmt: skip


def places(recorded: Recorded) -> tuple[int, int, int]:
    """Returns the offsets that the copy reads and writes, and the offset of the output."""
    (graph,) = recorded.graphs[1,]
    (copy,) = graph.recording.nodes
    assert isinstance(copy, MemcpyNode)
    return copy.source.offset, copy.target.offset, graph.outputs[0].offset


def test_tables_go_behind_each_other_with_what_refers_to_them() -> None:
    one = made_up([Table(offset=1024, contents=b"a" * 300)], at=((WEIGHTS, 1024), (ARENA, 0)))
    two = made_up([Table(offset=1024, contents=b"b" * 10), Table(offset=1280, contents=b"c")], at=((WEIGHTS, 1280), (ARENA, 0)))
    weight = made_up([Table(offset=1024, contents=b"d")], at=((WEIGHTS, 768), (ARENA, 0)))
    recordings = beside_each_other({"eager": one, "inductor": two, "cross-compile": weight, "max-autotune": one}, 1024)
    assert [table.offset for table in recordings["inductor"].tables] == [1536, 1792]
    assert places(recordings["eager"])[0] == 1024 and places(recordings["inductor"])[0] == 1792
    assert places(recordings["cross-compile"])[0] == 768, "the model's own weights stay"
    assert recordings["max-autotune"].tables == recordings["eager"].tables, "equal tables lie in one place"
    assert {recording.weights_bytes for recording in recordings.values()} == {1024 + 512 + 512 + 256 + PAD}


def test_what_a_later_call_takes_has_one_place_in_all() -> None:
    small = [DonatedRange(entry="a", offset=0, bytes=512), DonatedRange(entry="b", offset=512, bytes=512)]
    large = [DonatedRange(entry="a", offset=0, bytes=(4 << 20) + PAD), DonatedRange(entry="b", offset=6 << 20, bytes=512)]
    one = made_up(reserved=small, at=((ARENA, 512), (ARENA, 1024 + 64)))
    two = made_up(reserved=large, at=((ARENA, 6 << 20), (ARENA, 8 << 20)))
    recordings = beside_each_other({"cross-compile": one, "eager": two}, 1024)
    assert recordings["cross-compile"].reserved == recordings["eager"].reserved
    parts = {row.entry: row for row in recordings["eager"].reserved}
    assert parts["a"].bytes == (4 << 20) + PAD and parts["b"].bytes == 512
    end = parts["b"].offset + parts["b"].bytes
    for recording, before in ((recordings["cross-compile"], one), (recordings["eager"], two)):
        source, target, output = places(recording)
        assert source == parts["b"].offset and target == output >= end
        moved = target - places(before)[1]
        assert moved % (2 << 20) == 0, "and keeps its alignment"
        assert recording.graphs[1,][0].arena == before.graphs[1,][0].arena + moved


def test_other_contents_of_one_module_variable_conflict() -> None:
    def state(contents: bytes, offset: int = 1024) -> ModuleState:
        target = Address(memory=WEIGHTS, offset=offset)
        return ModuleState(image="i", symbol="s", contents=contents, relocations=(Relocation(at=0, target=target),))

    table = Table(offset=1024, contents=b"twiddles")
    one, same, other = [replace(made_up([table]), states=(state(contents),)) for contents in (b"a", b"a", b"b")]
    behind = replace(made_up([Table(offset=1024, contents=b"x"), Table(offset=1280, contents=b"y")]), states=())
    recordings = beside_each_other({"eager": behind, "inductor": one, "cross-compile": same, "max-autotune": other}, 1024)
    assert conflicts(recordings) == {frozenset(("inductor", "max-autotune")), frozenset(("cross-compile", "max-autotune"))}
    assert recordings["inductor"].states[0].relocations[0].target.offset == 1536
    assert merged({"inductor": recordings["inductor"]}, {(1,): "inductor"}).states == (), "of images that no kernel is of"
