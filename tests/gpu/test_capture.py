"""The capture recorder on a GPU: recordings replay bit for bit in a new process, and refused models give named errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")

from cgcompile.capture.recorder import Recorded, record  # noqa: E402
from tests.gpu.helpers.models import CASES  # noqa: E402
from tests.gpu.helpers.recording import RECORDED, check_recording, export, record_case  # noqa: E402

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def fft_keeps_its_table(recorded: Recorded) -> None:
    pointers = {state.symbol: len(state.relocations) for state in recorded.states}
    assert pointers == {"lut_sp": 1, "lut_dp": 0} and recorded.tables, "its table for doubles is not made: a pointer to nothing"


def the_changed_buffer_is_named(recorded: Recorded) -> None:
    assert [w.name for w in recorded.weights if w.memory == "state"] == ["calls"] and recorded.state_bytes == 512
    tied = {w.name: w.offset for w in recorded.weights}
    assert tied["first.weight"] == tied["second.weight"]


def the_arena_holds_one_key_at_a_time(recorded: Recorded) -> None:
    for (graph,) in recorded.graphs.values():
        recording = graph.recording
        reach = [r.target.offset for node in recording.nodes for r in getattr(node, "relocations", ()) if r.target.memory == 3]
        assert max(reach) < graph.arena


CHECKS = {"fft": fft_keeps_its_table, "counting": the_changed_buffer_is_named, "mlp_small": the_arena_holds_one_key_at_a_time}
"""Additional checks of the recording of a case."""


@gpu
@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_replays_bit_for_bit_elsewhere(name: str, tmp_path: Path) -> None:
    recorded = check_recording(name, tmp_path, "eager")
    CHECKS.get(name, lambda recorded: None)(recorded)


@gpu
@pytest.mark.parametrize(
    ("name", "error"), [("noisy", "random-operation"), ("overwriting", "input-mutated"), ("reading", "not-capturable")]
)
def test_what_cannot_be_saved_is_refused_by_name(name: str, error: type[Exception], tmp_path: Path) -> None:
    with raises(error, match=r"int_key \(2,\)"):
        record_case(name, tmp_path, "eager")


@gpu
def test_a_kernel_is_identified_by_its_image_not_its_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.helpers.names", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_fresh_inputs_of_another_shape_are_refused_before_anything_starts(tmp_path: Path) -> None:
    programs, calls = export("mlp_small")
    self_test = {key: (CASES["mlp_small"].inputs(key[0] + 1), {}) for key in calls}
    with raises("inputs-unlike", match=r"int_key \(1,\)|int_key \(4,\)"):
        record(programs, calls, folder=tmp_path, self_test=self_test)
    assert not list(tmp_path.iterdir())
