"""Differences of AOTInductor in torch 2.11: names of constants, and vectorized code that does not compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.exc import CppCompileError

import cgbundle
import cgcompile
from cgcompile.targets.cpu.aoti import compile_cpu, with_buffers
from tests.helpers.raising import raises


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.tensor(3.0)) + torch.tensor([1.0, 2.0])


class Stops(nn.Module):
    """Fills rows with a number in a loop that stops early: the branches of the condition read a copy of the number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + 1
            x[x.sum(1) > 4] = 0.5
            if (x > 0).all():
                break
        return x


def test_a_number_that_branches_read_is_a_constant_of_the_program(tmp_path: Path) -> None:
    """Inductor removes the copy, and would make a new constant of the number."""
    cgcompile.build(Stops(), lambda batch: (torch.randn(batch, 3),), sizes={"batch": (2,)}, target="cpu", out=tmp_path / "x.cgb")
    with cgbundle.load(str(tmp_path / "x.cgb")) as program:
        for x in (torch.rand(2, 3), torch.full((2, 3), 2.0), torch.tensor([[1.0, 2.0, 3.0], [-1.5, 0.0, 0.0]])):
            assert torch.equal(program(x), Stops()(x))


def test_constants_are_buffers_under_their_names() -> None:
    """torch 2.11 would name plain attributes _tensor_constant0, and so on, which is no name of a weight of the model."""
    program = torch.export.export(Scaled(), (torch.randn(2, 2),))
    module = with_buffers(program.module())
    named = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    assert named == set(program.constants) == set(dict(module.named_buffers()))
    assert torch.equal(module(torch.ones(2, 2)), Scaled()(torch.ones(2, 2)))


def test_code_that_does_not_compile_is_made_again_without_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is Swin with torch 2.11."""
    asked, messages = [], []

    def refused(module: Any, inputs: Any, options: Any) -> str:
        asked.append(options.get("cpp.simdlen"))
        raise RuntimeError("compiling failed") from CppCompileError(["g++"], "error: no class")

    monkeypatch.setattr(torch._inductor, "aot_compile", refused)
    with raises("compiler-failed"):
        compile_cpu(torch.export.export(Scaled(), (torch.randn(2, 2),)), tmp_path, messages.append)
    assert asked == [None, 1] and any("without vectors" in text for text in messages)
