"""Indices that rounding decides, from the build to the replay: no waiver, and nothing but equal floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cgbundle
import cgcompile
from cgbundle import exam
from cgbundle.tensors.exam_tensors import NEAR_TIES
from cgcompile.targets.cpu import build as cpu_build
from cgcompile.util.progress import Event
from tests.helpers.raising import raises

WORDS = 4096


class Words(nn.Module):
    """The likeliest word, and what a table holds of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, WORDS).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        token = ((x * 1.01 + 0.3) * 1.7 + 0.1).argmax(-1)  # Inductor leaves out the rounding to bfloat16 that makes ties
        return {"token": token + 1000, "value": self.table[token]}


def inputs(batch: int) -> torch.Tensor:
    return torch.rand(batch, WORDS).to(torch.bfloat16)


def test_a_build_tells_which_indices_differ_and_its_exam_holds_them(tmp_path: Path) -> None:
    told: list[Event] = []
    built = cgcompile.build(Words().eval(), inputs, sizes=[8], out=tmp_path / "a.cgb", target="cpu", progress=told.append)
    (verified,) = [event.text for event in told if (event.stage, event.state) == ("verify", "done")]
    assert "of 8 indices differ from eager PyTorch's where the values are equal within tolerance" in verified
    assert not built.manifest.waivers and 0 < (share := built.manifest.exam.bounds[0]) <= 1
    (found,) = [each for each in built.manifest.findings if each.rule == NEAR_TIES]
    assert found.message == f"output token (int64): up to {share:.1%} of the indices have another one that is as good"
    with cgbundle.load(built.path) as program:
        assert all(result.passed("tolerance") for result in exam.replay_exam(program))


def test_code_that_selects_another_word_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cpu_build.recalled_or_compiled

    def mistaken(program: torch.export.ExportedProgram, *rest: Any) -> Any:
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.argmax.default):
            node.target = torch.ops.aten.argmin.default
        program.graph_module.recompile()
        return plain(program, *rest)

    monkeypatch.setattr(cpu_build, "recalled_or_compiled", mistaken)
    with raises("proof-failed", match="output token"):
        cgcompile.build(Words().eval(), inputs, sizes=[8], out=tmp_path / "b.cgb", target="cpu", standalone=False)
