"""Models with state, models whose outputs share memory, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, PLACES, ROWS = 8, 6, 4
SIZES = (1, 4)


class Statistics(nn.Module):
    """A submodule that assigns one buffer and writes to another one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class Running(nn.Module):
    """A cache that is written at an index, a batch norm in training mode, a running mean, a counter, and a returned buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.key = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.statistics = Statistics()
        self.register_buffer("cache", torch.zeros(ROWS, PLACES, WIDTH))
        self.register_buffer("place", torch.full((1,), 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, 2, WIDTH) -> (2 * batch, WIDTH), the cache summed over its places, and the buffer `place` itself."""
        rows = torch.arange(x.shape[0], device=x.device)
        self.cache[rows, self.place] = self.key(x[:, 0])
        self.place.add_(1).remainder_(PLACES)
        flat = x.flatten(0, 1)
        return self.norm(flat) + self.statistics(flat), self.cache[: x.shape[0]].sum(1), self.place


class Looks(nn.Module):
    """Outputs that alias the input, a part of it, a weight or each other; also a number and None."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Takes two tensors (batch, WIDTH)."""
        output = self.linear(x) + y
        return {
            "made": output, "again": output, "first": output[:, 0], "turned": output.t(),
            "x": x, "row": y[0], "weight": self.linear.bias, "three": 3, "none": None,
        }  # fmt: skip


class Draws(nn.Module):
    """Random numbers of four distributions, and a call counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(batch, WIDTH) -> four tensors of this shape, and the counter."""
        self.calls.add_(1)
        ones = torch.ones_like(x)
        return (
            torch.rand_like(x), torch.randn_like(x) + 0 * x, nn.functional.dropout(ones, 0.25, training=True),
            torch.bernoulli(0.3 * ones), self.calls + 0,
        )  # fmt: skip


def singles(batch: int) -> tuple[Tensor, ...]:
    """Inputs of `Draws`."""
    return (torch.randn(batch, WIDTH),)


def rows(batch: int) -> tuple[Tensor, ...]:
    """Inputs of `Running`."""
    return (torch.randn(batch, 2, WIDTH),)


class Sum(nn.Module):
    """Adds two inputs; a third one has no elements."""

    def forward(self, x: Tensor, y: Tensor, nothing: Tensor) -> tuple[Tensor, Tensor]:
        """Two of (batch, WIDTH) and one of (batch, 0) -> twice their sum, and the empty tensor plus one."""
        return torch.cat([x + y, nothing], 1) * 2, nothing + 1


def triples(batch: int) -> tuple[Tensor, ...]:
    """Inputs of `Sum`."""
    return torch.randn(batch, WIDTH), torch.randn(batch, WIDTH), torch.empty(batch, 0)


def pairs(batch: int) -> tuple[Tensor, ...]:
    """Inputs of `Looks`."""
    return torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)


def draw(inputs: Callable[[int], tuple[Tensor, ...]], batch: int, seed: int, device: str) -> tuple[Tensor, ...]:
    """Draws inputs with a seed and moves them to a device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return tuple([tensor.to(device) for tensor in inputs(batch)])


def draws() -> Draws:
    """Returns the model in eval mode, where its dropout (training=True) still drops."""
    return Draws().eval()


def running() -> Running:
    """Returns the model in training mode, in which batch norm updates its statistics."""
    return Running().train()


def looks() -> Looks:
    return Looks().eval()


class Between(nn.Module):
    """State and mutated inputs on both sides of a host operation: the host counts, graphs keep a mean and a cache."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor, seen: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, WIDTH), (1,) int64 that the host adds to, (batch, WIDTH) that a graph overwrites -> (batch, WIDTH); the count."""
        h = self.before(x).relu().softmax(-1)
        self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        number = (h > 0.1).sum().item()
        self.count.add_(number)
        seen.add_(number)
        y = self.after(h / (number + 1)).tanh().softmax(-1) + self.mean
        self.cache[: x.shape[0]] += y
        last.copy_(self.cache[: x.shape[0]] * 2)
        return y.exp(), self.count


class BeforeBranch(nn.Module):
    """State that changes before and after a branch: a cache, an old value that is still used, and sums that the branch reads."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("cache", (ROWS, WIDTH)), ("old", (WIDTH,)), ("sums", (WIDTH,)), ("turned", (WIDTH,)), ("calls", ())):
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x: Tensor, place: Tensor) -> tuple[Tensor, ...]:
        """(WIDTH,), () int64 -> (ROWS,), the earlier value of `old` (WIDTH,), and a part of `old` times 3."""
        self.cache.index_copy_(0, place.view(1), x[None])
        kept, seen = self.old.clone(), self.old[2:]
        self.old.copy_(x * 2)
        self.sums.add_(x)
        turned, seen = self.turned + x, seen * 3
        scores = self.cache @ x

        def more(scores: Tensor, sums: Tensor) -> Tensor:
            return scores + sums.sum()

        y = torch.cond(scores.sum() > 0, more, lambda scores, sums: scores * 2, (scores, self.sums))
        self.calls.add_(1)
        self.turned.copy_(turned + self.turned)
        return y + self.calls, kept, seen


class HostDraws(nn.Module):
    """Random numbers of four distributions around a host operation, which updates the counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(batch, WIDTH) -> the outputs of `Draws`."""
        uniform = torch.rand_like(x)
        one = (uniform < 2).all().sum().item()
        self.calls.add_(one)
        ones = torch.ones_like(x) * one
        return (
            uniform, torch.randn_like(x) * one, nn.functional.dropout(ones, 0.25, training=True), torch.bernoulli(0.3 * ones),
            self.calls + 0,
        )  # fmt: skip


def between(batch: int) -> tuple[Tensor, ...]:
    """Inputs of `Between`."""
    return torch.randn(batch, WIDTH), torch.full((1,), 5), torch.randn(batch, WIDTH)


def before_branch() -> tuple[Tensor, ...]:
    """Inputs of `BeforeBranch`."""
    return torch.randn(WIDTH), torch.tensor(1)
