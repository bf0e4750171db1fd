"""Small models that together contain everything that a bundle must store."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class State(NamedTuple):
    """A named tuple in the inputs and outputs."""

    hidden: torch.Tensor
    steps: torch.Tensor


class Everything(nn.Module):
    """Nested inputs and outputs, tied weights, persistent and other buffers, a literal, mixed dtypes, a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(32, 8)
            self.head = nn.Linear(8, 32, bias=False)
            self.head.weight = self.embed.weight
            self.low = nn.Linear(8, 8).to(torch.bfloat16)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.register_buffer("table", torch.arange(8, dtype=torch.float32))
            self.register_buffer("hidden_table", torch.arange(8, dtype=torch.float16), persistent=False)
            self.register_buffer("expanded", torch.ones(1).expand(8))

    def forward(self, ids: torch.Tensor, extra: dict, state: State, flag: int = 2, nothing: None = None) -> dict:
        rows = self.embed(ids) * self.scale + self.table + extra["bias"][0] * self.expanded
        rows = rows + torch.tensor([0.5, -0.5] * 4) * flag
        half = self.low(rows.to(torch.bfloat16))
        return {
            "logits": self.head(rows),
            "half": half,
            "state": State(hidden=state.hidden + rows.to(torch.float16) + self.hidden_table, steps=state.steps + 1),
            "mask": [ids > 3, None],
            "constant": 7,
        }


def everything_inputs(batch: int) -> tuple:
    return (
        torch.randint(0, 32, (batch,)),
        {"bias": [torch.randn(batch, 8)], "unused": None},
        State(hidden=torch.randn(batch, 8).to(torch.float16), steps=torch.arange(batch, dtype=torch.int32)),
    )


class Image(nn.Module):
    """Channels-last input and weights, and an output that is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.second = nn.Conv2d(8, 4, 3, stride=2, padding=1)
        self.to(memory_format=torch.channels_last)
        self.eval()

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.relu(self.norm(self.first(pixels)))
        return self.second(features), features.transpose(1, 2)


def image_inputs(batch: int, side: int) -> torch.Tensor:
    return torch.randn(batch, 3, side, side).to(memory_format=torch.channels_last)


class Batched(nn.Module):
    """A function of a (batch, 4) tensor."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[operator]


def rows(batch: int) -> torch.Tensor:
    return torch.rand(batch, 4)
