"""A model file with 24 MLP blocks: 72 launches of few different kernels. Bundles with many int_keys (many_keys.py) build from it in
minutes without a GPU."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, LAYERS = 256, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) -> the same shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)]).bfloat16().eval()


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, WIDTH, dtype=torch.bfloat16),)
