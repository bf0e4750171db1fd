"""The weight matrices of one Llama layer and of the head, for tuning only. Attention and norms are left out.

LLAMA_SHAPE is "8b" or "1b". Weights are uninitialized bfloat16.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES = {"8b": (4096, 1024, 14336, 128256), "1b": (2048, 512, 8192, 128256)}
"""Width, width of keys, width of the MLP, vocabulary."""


class Layer(nn.Module):
    """Rows (batch, width) -> logits."""

    def __init__(self, width: int, keys: int, inner: int, vocabulary: int) -> None:
        super().__init__()

        def linear(a: int, b: int) -> nn.Module:
            return nn.utils.skip_init(nn.Linear, a, b, bias=False, dtype=torch.bfloat16)

        self.q, self.k, self.v, self.o = linear(width, width), linear(width, keys), linear(width, keys), linear(width, width)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)
        self.head = linear(width, vocabulary)
        self.groups = width // keys

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.q(x) * (self.k(x) + self.v(x)).repeat(1, self.groups))
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(x).float()


def model() -> nn.Module:
    return Layer(*SHAPES[os.environ["LLAMA_SHAPE"]]).eval()


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.zeros(batch, SHAPES[os.environ["LLAMA_SHAPE"]][0], dtype=torch.bfloat16),)
