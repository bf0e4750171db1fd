"""Models whose Python code branches on tensor values, as published models do."""

from __future__ import annotations

import math
import random

import torch
from torch import nn


def foo(x: torch.Tensor) -> torch.Tensor:
    """The first example in the source of PyTorch's CUDA graph trees."""
    y = x * x * x
    if y.sum() > 0:  # noqa: SIM108  as PyTorch has it
        z = y**y
    else:
        z = y.abs() ** y.abs()
    return z * torch.rand_like(z)


class Foo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return foo(x)


class Held(nn.Module):
    """Base of the models below: layers, a state and a flag."""

    seen: torch.Tensor
    ready: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("ready", torch.tensor(False))


class Twelve(Held):
    """Twelve independent branches: 4096 paths."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turn in range(12):
            if x[turn % 3, turn % 4] > turn / 20:
                x = self.layers[turn % 3](x) + turn
        return x


class EarlyReturns(Held):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            if x.min() < -2:
                return x * 3
            x = x.abs()
        elif not (x > 0).all():
            return -x
        return (x + 1).relu()


class Breaks(Held):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turns = torch.zeros(())
        for layer in self.layers:
            x = layer(x).tanh()
            turns = turns + 1
            if x.abs().mean().item() < 0.4:
                break
        return x, turns


class Numbers(Held):
    """`.item()` in conditions and in arithmetic, and an assertion, whose message the call raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = x.max().item()
        assert most < 4, "too large"
        if most > 1 and x.min().item() < -most / 2:
            return x * most
        return x + most


class State(Held):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready.item():
            self.seen.add_(x.mean())
            self.ready.fill_(True)
        if x.sum() > 0:
            self.seen = self.seen * 0.5
        return x + self.seen


class Converted(Held):
    """`int()` and `float()` of tensors and of numbers, in conditions and in arithmetic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int((x > 0).sum())
        if count == 0:
            return x - 1
        total = int(x.sum())
        if float(total) / 2 > 0.6 or isinstance(total, str):
            x = x * total
        return x / count + total / 3 + float(x[0, 0]) * int(2.5)


class Listed(Held):
    """`tolist()` of several numbers, and conditions from `math`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, *more = x[0].tolist()
        if math.isnan(first / second) or not math.isfinite(second):
            return torch.zeros_like(x)
        if first > second and sum(more) > 0 and max(x[1].tolist()) > 1:
            return x * 2
        return x + first


class Scaled(Held):
    """Numbers from tensors, without a branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * int(x.abs().max()) + float(x.sum())


class Written(Held):
    """Some paths write to the input, and one output derives from a view of it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = x[1]
        if x[0, 0] > 0:
            x.mul_(2)
        if torch.equal(x[0], x[2]):
            row.add_(1)
        return x.sum() + row.sum(), row * 1


class Parts(Held):
    """Lists, dicts, any(), and values on the stack of the Python frame."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: dict[str, list[torch.Tensor]] = {"rows": [x[:, 0], x[:, 1]]}
        if any((part > 1).any() for part in parts["rows"]):
            parts["rows"][0] = parts["rows"][0] / 2
        return (parts["rows"][0] if x[0, 0] > 0 else parts["rows"][1]) + (x[:, 2] if x[0, 1] > 0 else x[:, 3])


class Best(Held):
    """A C function (`max`) evaluates the condition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return max([x[0], x[1], x[2]], key=lambda row: row.sum()) * 2


class Again(Held):
    """Uses one condition twice: its value must not change. A Python counter is part of the loop's condition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive, turns = (x > 0).any(), 0
        output = x + 1 if positive else x
        while turns < 2 and (output > 1).any():
            output = output / 2
            turns += 1
        return output * turns if positive else output - turns


class Drawn(Held):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.rand_like(x) if x.sum() > 0 else x * torch.randn_like(x) + torch.rand(1)
        return x + torch.rand_like(x)


class Chosen(Held):
    """A data-dependent size comes before the branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x[x > 0].sum()
        if total > 3:
            x = x + 1
        return x / x.abs().max().item() + total


class Nested(Held):
    """Nested calls: `relu` is on the stack of the Python frame while its argument is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Gated(0.0), Gated(0.2), Gated(0.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(self.layers[0](x)))


class Gated(nn.Module):
    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > self.least:
            return x.sin()
        return x * 1.5


def rows() -> torch.Tensor:
    return torch.randn(3, 4)


def calls(count: int) -> list[torch.Tensor]:
    """Returns `count` inputs, float32 [3, 4], that take a model along different paths."""
    chance = random.Random(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        inputs = [torch.randn(3, 4) * chance.choice([0.05, 0.5, 1, 2]) + chance.choice([0, 0, 1, -1]) for _ in range(count)]
    return [torch.cat([x[:2], x[:1]]) if number % 5 == 0 else x for number, x in enumerate(inputs)]
