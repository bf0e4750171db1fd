"""A program with state and mutated inputs on both sides of a host region, cross-compiled and proved by interpretation. The proof
uses eager PyTorch for the host region, which is not compiled here; tests/gpu runs its code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import cgcompile
from cgcompile.offline import trace
from cgcompile.offline.compile.programmatic_launch import begin_early
from cgcompile.offline.lowered import TEMPORARY, Begin, Launch, Lowered, LoweredProgram, Pointer
from cgcompile.targets.cuda import host_regions
from tests.helpers.lowered_here import lower_here
from tests.helpers.models.state_models import ROWS, WIDTH, BeforeBranch, Between, before_branch, between
from tests.helpers.uncompiled import uncompiled


def test_calls_carry_state_through_graphs_and_host_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_regions, "compile_host_regions", uncompiled)
    lower_here(monkeypatch)
    built = cgcompile.build(Between().eval(), between, sizes=[2], out=tmp_path / "between.cgb", target="sm_90")
    manifest = built.manifest
    (proof,) = manifest.entries[0].self_test.proofs
    assert (proof.method, manifest.entries[0].self_test.calls, manifest.entries[0].mutated_inputs) == ("interpret", 2, (1, 2))
    assert len(proof.errors) == len(manifest.entries[0].outputs) + 2 + 3 and proof.error <= proof.tolerance
    state = {row.name: row for row in manifest.weights if row.memory == "state"}
    assert set(state) == {"mean", "count", "cache"}
    (program,) = manifest.entries[0].programs
    values = program.values
    moves = [
        (values[step.inputs[0]], values[step.outputs[0]]) for step in program.steps if step.kind == "copy"
    ]  # values that the host changes are copied there and back; values that graphs change stay in place
    there = [(source.memory, source.offset) for source, target in moves if target.memory == "host"]
    back = [(target.memory, target.offset) for source, target in moves if source.memory == "host"]
    seen = values[program.inputs[1]]
    assert there.count(("state", state["count"].offset)) == back.count(("state", state["count"].offset)) == 1
    assert there.count(("inputs", seen.offset)) == back.count(("inputs", seen.offset)) == 1
    assert not {("state", state[name].offset) for name in ("mean", "cache")} & {*there, *back}


def test_state_is_written_where_its_new_value_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_here(monkeypatch)
    programs: list[LoweredProgram] = []
    monkeypatch.setattr(trace, "begin_early", lambda program: programs.append(program) or begin_early(program))
    built = cgcompile.build(BeforeBranch().eval(), before_branch, out=tmp_path / "branch.cgb", target="sm_90")
    (proof,) = built.manifest.entries[0].self_test.proofs
    assert (proof.method, built.manifest.entries[0].self_test.calls) == ("interpret", 2) and proof.error <= proof.tolerance
    assert len(proof.errors) == len(built.manifest.entries[0].outputs) + 5
    lowered = programs[0].lowered
    branch = next(number for number, event in enumerate(lowered.events) if isinstance(event, Begin))
    launches = [
        [event for event in part if isinstance(event, Launch)] for part in (lowered.events[:branch], lowered.events[branch:])
    ]
    before, behind = [{name(lowered, place) for launch in part for place in pointers(launch)} for part in launches]
    assert {"cache", "old"} <= before and not {"cache", "old"} & behind
    assert {"calls", "turned"} <= behind
    crossing = {buffer.nbytes for buffer in lowered.buffers if buffer.kind == TEMPORARY}
    assert max(crossing) < ROWS * WIDTH * 4, "no copy of the cache"


def pointers(launch: Launch) -> list[Pointer]:
    return [argument for argument in launch.arguments if isinstance(argument, Pointer)]


def name(lowered: Lowered, place: Pointer) -> str:
    return lowered.buffers[place.buffer].name.rpartition(".")[2]
