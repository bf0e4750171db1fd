"""Models that mutate their inputs, and their inputs by batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, PLACES = 8, 6

Inputs = Callable[[int], tuple[Tensor, ...]]


class Step(nn.Module):
    """One decoding step: writes a row to the cache at `place` and increments `place`.

    The inputs contain the last valid `place`, so a second run on the same memory would write out of bounds.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor, place: Tensor) -> Tensor:
        """(batch, WIDTH), (batch, PLACES, WIDTH), (1,) -> (batch, WIDTH)."""
        cache[:, place] = self.key(x).unsqueeze(1)
        place.add_(1)
        scores = (cache * x.unsqueeze(1)).sum(-1).softmax(-1)
        return self.out((scores.unsqueeze(-1) * cache).sum(1))


class Whole(nn.Module):
    """Adds to the whole input."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


class Views(nn.Module):
    """Writes to views of its input, one of them transposed, and to a single row."""

    def forward(self, x: Tensor) -> Tensor:
        x.view(-1)[1:3].mul_(5)
        x.t().add_(1)
        x[0] = 0
        return x.sum(1)


class Both(nn.Module):
    """Reads three inputs and writes to the first and the last."""

    def forward(self, first: Tensor, scale: Tensor, last: Tensor) -> Tensor:
        first.mul_(scale)
        last[:, 2:4].copy_(first[:, :2] + 1)
        return first + last


class Returned(nn.Module):
    """Returns its mutated input, whole and in part."""

    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        x[0] = row
        return x, x[0]


class Afterwards(nn.Module):
    """Writes to its input after the output is computed."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        x.zero_()
        return y


class Together(nn.Module):
    """Four of these models, each with its own inputs: one program to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.views, self.returned, self.afterwards = Whole(), Views(), Returned(), Afterwards()

    def forward(self, w: Tensor, v: Tensor, r: Tensor, row: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        return self.whole(w), self.views(v), *self.returned(r, row), self.afterwards(a)


class Kinds(nn.Module):
    """Writes to a bool mask, an integer counter and a bfloat16 tensor."""

    def forward(self, x: Tensor, mask: Tensor, counter: Tensor, half: Tensor) -> Tensor:
        mask.logical_not_()
        counter += 1
        half.copy_(x * 3)
        return x * mask + counter


def drawn(*widths: int) -> Inputs:
    """Returns a function that draws float32 (batch, width) for every width."""
    return lambda batch: tuple([torch.randn(batch, width) for width in widths])


def step(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, WIDTH), torch.randn(batch, PLACES, WIDTH), torch.full((1,), PLACES - 1)


def kinds(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3), torch.rand(batch, 3) > 0.5, torch.arange(batch)[:, None], torch.randn(batch, 3).bfloat16()


def row(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3), torch.randn(3)


def together(batch: int) -> tuple[Tensor, ...]:
    return *drawn(3, 5)(batch), *row(batch), *drawn(3)(batch)


MODELS: dict[str, tuple[type[nn.Module], Inputs, tuple[int, ...]]] = {
    "step": (Step, step, (1, 2)),
    "whole": (Whole, drawn(3), (0,)),
    "views": (Views, drawn(5), (0,)),
    "both": (Both, drawn(4, 4, 4), (0, 2)),
    "returned": (Returned, row, (0,)),
    "afterwards": (Afterwards, drawn(3), (0,)),
    "kinds": (Kinds, kinds, (1, 2, 3)),
    "together": (Together, together, (0, 1, 2, 4)),
}
"""Name -> the model, its inputs, and the positions of the inputs that it mutates."""

WHOLE = ("both", "kinds", "step", "together")
"""The models that together cover all others."""


def draw(inputs: Inputs, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Draws inputs on the CPU; the result depends on the batch and the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * batch + seed)
        return inputs(batch)


def eager(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the outputs of PyTorch, and copies of the inputs after the call."""
    copies = tuple([tensor.clone() for tensor in inputs])
    with torch.no_grad():
        result = network(*copies)
    outputs = result if isinstance(result, tuple) else (result,)
    return tuple([tensor.clone() for tensor in outputs]), copies
