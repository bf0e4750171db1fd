"""What a compiled region calls a constant is what the model calls it."""

from __future__ import annotations

import torch
from torch import nn

from cgcompile.targets.cpu.aoti import with_buffers


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.tensor(3.0)) + torch.tensor([1.0, 2.0])


def test_constants_are_buffers_under_their_names() -> None:
    """As plain attributes torch 2.11 would call them _tensor_constant0, which is no weight of the model."""
    program = torch.export.export(Scaled(), (torch.randn(2, 2),))
    module = with_buffers(program.module())
    named = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    assert named == set(program.constants) == set(dict(module.named_buffers()))
    assert torch.equal(module(torch.ones(2, 2)), Scaled()(torch.ones(2, 2)))
