"""A model to split by its layers: state in each layer, weights that are read at both ends, a returned view, two entries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH, TOKENS = 32, 50


class Layer(nn.Module):
    """A layer that stores its last input in a buffer."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, generator=generator) * 0.2)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, generator=generator) * 0.2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = (x + turned) @ self.up.t()
        hidden.relu_()  # a write to its own value
        return x + hidden @ self.down.t() * self.calls


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(TOKENS, WIDTH, generator=generator))
        self.layers = nn.ModuleList([Layer(generator) for _ in range(5)])
        self.register_buffer("turns", torch.linspace(0, 1, WIDTH))

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, turned = self.embedding[ids], places[:, None] * self.turns
        halfway = x
        for number, layer in enumerate(self.layers):
            x = layer(x, turned)
            halfway = x if number == 1 else halfway
        return x @ self.embedding.t(), halfway.t(), turned > 1, self.layers[4].calls

    def reset(self, places: torch.Tensor) -> torch.Tensor:
        """Changes the state on every device without reading state of another device."""
        for layer in self.layers:
            layer.calls.zero_()
        return places + 1


def model() -> nn.Module:
    return Layers().eval()


def called(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, TOKENS, (batch,)), torch.randint(0, 9, (batch,))


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 9, (batch,)),)


def entries() -> dict[str, Callable[..., tuple[torch.Tensor, ...]]]:
    return {"forward": called, "reset": rows}
