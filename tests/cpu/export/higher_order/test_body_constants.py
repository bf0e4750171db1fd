"""Tensors that bodies make from Python numbers become constants of the program, which computes what eager PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.model.load import load_source

TURNS = 3


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def step(turn: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return turn + torch.tensor(1), torch.where(value > 0, value * torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.5))

        return torch.while_loop(lambda turn, _: turn < torch.tensor(TURNS), step, (torch.zeros((), dtype=torch.int64), x))[1]


class Nested(nn.Module):
    """Both branches create a tensor; one of them contains more branches."""

    def forward(self, x: Tensor) -> Tensor:
        def outer(y: Tensor) -> Tensor:
            inner = lambda z: z * torch.tensor(3.0)  # noqa: E731
            other = lambda z: z - torch.tensor([1.0, 2.0, 3.0])  # noqa: E731
            return torch.cond(y.max() > 1, inner, other, (y + torch.tensor(0.25),))

        return torch.cond(x.sum() > 0, outer, lambda y: y + torch.tensor([3.0, 2.0, 1.0]), (x,))


class Writing(nn.Module):
    """The body writes only to its own tensors."""

    def forward(self, x: Tensor) -> Tensor:
        def yes(y: Tensor) -> Tensor:
            y_copy = y.clone()
            y_copy[0].mul_(torch.tensor(2.0))
            return y_copy

        return torch.cond(x.sum() > 0, yes, lambda y: y * 2, (x,))


@pytest.mark.parametrize("model", [Loop(), Nested(), Writing()], ids=lambda model: type(model).__name__)
def test_a_tensor_made_in_a_body(model: nn.Module) -> None:
    program = export(load_source(model, lambda: torch.rand(2, 3)), {}).programs.first
    assert program.constants
    functional(program)
    for x in [torch.rand(2, 3), torch.rand(2, 3) * 5, -torch.rand(2, 3)]:
        torch.testing.assert_close(program.module()(x.clone())[0], model(x.clone()))
