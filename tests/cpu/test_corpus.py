"""A few models of the corpus: exported and checked, and two of them built; all of it is `python -m tests.corpus`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.corpus.jobs import Job, Plan, run
from tests.corpus.judge import BUILT, CHECK, FAILED, REFUSED, RIGHT, TIMEOUT, WRONG, judge, refusal, replayed
from tests.corpus.models import all_cases, find
from tests.corpus.report import summary


def test_there_are_enough_models_and_each_has_a_name() -> None:
    cases = all_cases()
    every = [*cases, *[member for case in cases for member in case.members]]
    assert [name for name, count in Counter(case.name for case in every).items() if count > 1] == []
    models = [case.name for case in cases if not case.members]
    assert len(models) >= 120
    assert sum(name.startswith("transformers/") for name in models) >= 50
    assert sum(len(case.members) for case in cases) >= 100


CHECKED = ("layers/group-03", "layers/group-09", "transformers/causal/llama", "transformers/sequence/t5-encoder")


@pytest.mark.parametrize("name", CHECKED)
def test_a_published_model_passes_the_checks(name: str, tmp_path: Path) -> None:
    case = find(name)
    if case.missing():
        pytest.skip(f"needs {', '.join(case.missing())}")
    row = judge(case, CHECK, tmp_path / "none.cgb", "none")
    assert (row.verdict, row.message) == (BUILT, "graph")


def test_a_layer_is_built_and_right_with_other_inputs_and_between_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = find("layers/Linear")
    row = judge(case, "cpu", tmp_path / "linear.cgb", "none")
    assert (row.verdict, row.message, row.between) == (RIGHT, "", "right")
    assert 0 < row.error < 1  # other inputs than the exam's, rounded elsewhere
    assert row.stages is not None and {"export", "lower", "load", "compare"} <= row.stages.keys()

    def changed(module: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            next(module.parameters()).add_(0.01)
        return module

    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: changed(module))
    row = replayed(case, "cpu", tmp_path / "linear.cgb", {})
    assert row.verdict == WRONG and "output 0: by " in row.message


def test_errors_are_told_apart_by_what_they_name() -> None:
    from cgcompile.errors import BuildError, ModelError

    case = find("layers/Linear")
    place = "/site-packages/transformers/modeling.py:12"
    assert refusal(case, "cpu", ModelError("check-refused", f"{place}: rule: message")).verdict == REFUSED
    assert refusal(case, "cpu", ModelError("check-refused", "model: rule: message")).verdict == FAILED
    assert refusal(case, "cpu", ModelError("check-refused", "/site-packages/torch/nn/functional.py:3: rule")).verdict == FAILED
    assert refusal(case, "cpu", BuildError("compiler-failed", f"{place}: CppCompileError")).verdict == FAILED
    assert refusal(case, "cpu", BuildError("proof-failed", "the bundle's outputs differ from eager PyTorch")).verdict == WRONG


def test_a_case_that_takes_too_long_is_ended_and_the_members_of_a_group_are_tried_alone() -> None:
    case, rows = find("layers/group-01"), []
    plan = Plan(jobs=2, limit=0.1, until=0.0, prove="none", keep=None, replay=False, gpus=0)
    run(plan, [Job(case, CHECK)], rows.append)
    assert [row.verdict for row in rows] == [TIMEOUT] * 9
    assert {row.name for row in rows} == {case.name, *[member.name for member in case.members]}
    assert "| layers | 9 |" in summary(rows) and "0 of 9 good" in summary(rows)
