"""Small models that a bundle cannot hold as one graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64


@torch.library.custom_op("cgcompile_tests::by_sum", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def by_sum(x: torch.Tensor) -> torch.Tensor:
    """Sorts the rows by their sum, largest first."""
    return x[torch.argsort(x.sum(1), descending=True)]


@by_sum.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layers(nn.Module):
    """Layers with the operation `between` in the middle."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = x
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + x
            if number == 0:
                early = x
            if number == len(self.layers) // 2:
                x = self.between(x)
        return x + early


class Masked(Layers):
    """A boolean index, and a number that Python reads."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1.0 + x[x > 0].sum().item() / x.numel())


class Unsafe(Layers):
    """A custom operator that must not be captured."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return by_sum(x)


class Twice(Layers):
    """Python reads two numbers, so there are three graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) * 2 + torch.tanh(x) - torch.sigmoid(x) + torch.cos(x)
            if number in (1, 3):
                x = x / (1.0 + x.abs().amax().item())
        return x


class Softmax(nn.Module):
    """A copy to the CPU and back between two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return torch.softmax(y / y.sum().cpu(), -1)


class Table(nn.Module):
    """An embedding table on the CPU, and an output that is computed on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5000, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = (x.abs() * 1000).long().clamp(max=4999)
        rows = F.embedding(ids[:, 0].cpu(), self.table).to(x.device)
        return self.layer(rows) + x, rows


MODELS = {"masked": Masked, "unsafe": Unsafe, "twice": Twice, "softmax": Softmax, "table": Table}
KINDS = {
    "masked": ["graph", "host", "graph"],
    "unsafe": ["graph", "host", "graph"],
    "twice": ["graph", "host", "graph", "host", "graph"],
    "softmax": ["graph", "graph"],
    "table": ["graph", "host", "graph"],
}
"""The kinds of a program's steps, except copies, by model."""
