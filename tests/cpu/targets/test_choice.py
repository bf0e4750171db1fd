"""Values of `--target` other than GPUs."""

from __future__ import annotations

import pytest

from cgcompile.targets.choice import Options, choose, recorder_for, resolved
from cgcompile.targets.instruction_sets import LEVELS
from tests.helpers.raising import raises


@pytest.mark.parametrize(("gpu", "target", "recorder"), [("", "cpu", "host"), ("sm_90", "cuda", "capture")])
def test_a_check_is_for_what_a_build_is_for(monkeypatch: pytest.MonkeyPatch, gpu: str, target: str, recorder: str) -> None:
    monkeypatch.setattr("cgcompile.targets.choice._here", lambda: gpu)
    chosen = choose(Options(target="auto"))
    assert (resolved("auto"), recorder_for("auto")) == (target, recorder)
    assert (chosen.target, chosen.recorder) == (gpu or "cpu", recorder)
    assert [resolved(target_name) for target_name in ("cpu", "cuda", "sm_80")] == ["cpu", "cuda", "sm_80"]


def test_a_level_of_processors_is_built_and_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cgcompile.targets.choice.processor_flags", lambda: frozenset(LEVELS[1].features))
    monkeypatch.setattr("cgcompile.targets.choice.os.uname", lambda: type("Uname", (), {"machine": "x86_64"}))
    choice = choose(Options(target="x86-64-v3"))
    assert (choice.target, choice.recorder, choice.runs_here) == ("x86-64-v3", "host", True)
    with raises("target-unavailable", match="lower 'eager': the cpu target has one lowering"):
        choose(Options(target="x86-64-v3", lower="eager"))
    with raises(
        "target-unavailable", match="target x86-64-v4: this processor lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl"
    ):
        choose(Options(target="x86-64-v4"))


def test_a_level_that_does_not_exist() -> None:
    with raises("target-unavailable", match="target 'x86-64-v9': no such architecture") as caught:
        choose(Options(target="x86-64-v9"))
    assert "x86-64-v3" in caught.value.hint
