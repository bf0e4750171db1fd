"""The models of the golden bundles: as small as they can be and still have every part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCABULARY, TOKENS = 32, 2, 96, 8

Made = tuple[nn.Module, Callable[[int], tuple[Any, ...]] | dict[str, Callable[..., tuple[Any, ...]]]]


class Block(nn.Module):
    """A transformer block with causal attention.  The attention is written as products and sums, which Inductor makes one small
    kernel of; the library's attention kernels are megabytes of machine code."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, WIDTH) -> the same; `hidden` is added to the scores."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * (width // HEADS) ** -0.5 + hidden
        mixed = (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids (batch, TOKENS) -> logits of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("hidden", torch.full((TOKENS, TOKENS), -1e4).triu(1))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The weights of the last layer are those of the first."""
        x = self.token(ids) + self.place.weight
        for block in self.blocks:
            x = block(x, self.hidden)
        return self.head(self.norm(x[:, -1]))


def gpt_two() -> Made:
    """Two layers, bf16, tied weights."""

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, VOCABULARY, (batch, TOKENS)),)

    return GPT().bfloat16(), inputs


def mlp() -> Made:
    """Two layers, bf16."""

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 16, dtype=torch.bfloat16),)

    return perceptron().bfloat16(), inputs


class Cached(nn.Module):
    """Writes what it made of a row into a cache, an input, and gives the cache's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron()

    def forward(self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """(batch, 16), (batch, TOKENS, 4), (1,) -> (batch, 4)."""
        cache[:, place] = self.network(x).unsqueeze(1)
        return cache.mean(1)


def cpu_mlp() -> Made:
    """fp32, batch 1 and 4."""
    return perceptron(), lambda batch: (torch.randn(batch, 16),)


def cpu_cache() -> Made:
    """Two layers, fp32, and an input that calls change."""

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(batch, 16), torch.randn(batch, TOKENS, 4), torch.randint(0, TOKENS, (1,))

    return Cached(), inputs


class Stateful(nn.Module):
    """Writes what it made of a row into a cache, a buffer, under dropout, and hands the counter out."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron()
        self.register_buffer("cache", torch.zeros(4, TOKENS, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(batch, 16) -> (batch, 4), its first column, the counter, x itself."""
        rows = torch.arange(x.shape[0], device=x.device)
        self.cache[rows, self.place] = nn.functional.dropout(self.network(x), 0.5, training=True)
        self.place.add_(1).remainder_(TOKENS)
        sums = self.cache[: x.shape[0]].sum(1)
        return sums, sums[:, 0], self.place, x


def state() -> Made:
    """fp32, with state, random numbers, and outputs that share memory."""

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 16),)

    return Stateful(), inputs


def cpu_state() -> Made:
    """The same."""
    return state()


class Kept(nn.Module):
    """Writes what it made of a row into a cache, a buffer, and counts in an input; hands out the counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron()
        self.register_buffer("cache", torch.zeros(4, TOKENS, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(batch, 16), (1,) int64 -> (batch, 4), the counter."""
        rows = torch.arange(x.shape[0], device=x.device)
        self.cache[rows, self.place] = self.network(x)
        self.place.add_(1).remainder_(TOKENS)
        count += x.shape[0]
        return self.cache[: x.shape[0]].sum(1), self.place


def traced_state() -> Made:
    """fp32, with state, an input that calls change, and an output that is state."""

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(batch, 16), torch.randint(0, 9, (1,))

    return Kept(), inputs


class Turning(nn.Module):
    """A loop in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def turns(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            start = torch.zeros((), dtype=torch.int64, device=y.device)
            count, v = torch.while_loop(lambda i, v: v.sum() < 50, lambda i, v: (i + 1, v * 1.5 + 1), (start, y))
            return v, count

        def none(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return y.sin(), y.sum().to(torch.int64)

        y = x @ self.weight
        return torch.cond(y.sum() > 0, turns, none, (y,))


def traced_branches() -> Made:
    """fp32, with a branch and a loop as conditional nodes."""

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 8),)

    return Turning().eval(), inputs


class Routed(nn.Module):
    """One of three ways, by a number that the call gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        def others(w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cond(w == 2, lambda w, y: y @ self.weight, lambda w, y: y.sin(), (w, y))

        return torch.cond(way == 5, lambda w, y: y.exp(), others, (way, x))


def traced_switch() -> Made:
    """fp32, with a switch as a conditional node."""
    return Routed().eval(), lambda batch: (torch.randn(batch, 8), torch.tensor(2))


@dataclass
class Batch:
    """A call's tensors, and a number that is none."""

    x: torch.Tensor
    scale: float = 2.0


@dataclass
class Result(OrderedDict[str, Any]):
    """As transformers has its outputs: a dict of the fields that are not None."""

    y: torch.Tensor
    loss: torch.Tensor | None = None
    parts: tuple[Batch, ...] = ()

    def __post_init__(self) -> None:
        self.update({field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None})


class Recording(nn.Module):
    """Takes a dataclass, and gives one inside another class."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron()

    def forward(self, batch: Batch, *, shift: torch.Tensor) -> Result:
        """(batch, 16), (4,) -> (batch, 4), twice."""
        scaled = self.network(batch.x) * batch.scale
        return Result(scaled, parts=(Batch(scaled + shift, 1.0),))


def cpu_records() -> Made:
    """fp32, with classes of its own in the call and the result."""

    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (Batch(torch.randn(batch, 16)),), {"shift": torch.randn(4)}

    return Recording(), inputs


class Lanes(nn.Module):
    """Three entries over one buffer and one set of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("cache", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 16) -> (batch, 4)."""
        return self.linear(x).relu()

    def fill(self, x: torch.Tensor, lane: torch.Tensor) -> torch.Tensor:
        """(rows, 16), (1,): adds to a lane -> (1, 4), what is in it then."""
        self.cache[lane] += self.linear(x).sum(0)
        return self.cache[lane]

    def empty(self, lane: torch.Tensor) -> torch.Tensor:
        """(1,) -> (4,), the sums of all lanes."""
        self.cache[lane] = 0
        return self.cache.sum(1)


def cpu_entries() -> Made:
    """fp32, with an entry that may be padded and one that changes state; a shared object each is what its bytes allow."""
    model, entries = traced_entries()
    assert isinstance(entries, dict)
    return model, {name: entries[name] for name in ("forward", "fill")}


def traced_entries() -> Made:
    """fp32, with an entry that may be padded, one with a dimension of its own, and one without any."""

    def rows(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 16),)

    def filling(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 16), torch.randint(0, 4, (1,))

    def emptied() -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, 4, (1,)),)

    return Lanes(), {"forward": rows, "fill": filling, "empty": emptied}


def cpu_lanes() -> Made:
    """fp32: prefill at two lengths, decode at two batch sizes and a method that only writes, over one key-value cache."""
    from tests.helpers.models.entry_models import ENTRIES, lanes

    return lanes(), ENTRIES


class Fixed(nn.Module):
    """Weights that no update may change: a constant, a buffer that is in no state_dict, state where `counts`; and where matrix
    products are traced, the scale and shift of a normalization, which are folded."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.counts = nn.Linear(8, 8), nn.BatchNorm1d(8), counts
        self.tied = self.linear.bias
        self.register_buffer("mask", torch.tensor([1.0, 0.0] * 4), persistent=False)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls.add_(1)
        return self.norm(self.linear(x)) * self.mask + torch.tensor([0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5]) + self.tied


def cpu_fixed() -> Made:
    """For a runtime that updates weights."""
    return Fixed(True), lambda batch: (torch.randn(batch, 8),)


def traced_fixed() -> Made:
    """The same, some of it folded."""
    return Fixed(False), lambda batch: (torch.randn(batch, 8),)


class Positions(nn.Module):
    """Something of every place is added, which depends on the length alone: the build computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.read = nn.Linear(8, 8), nn.Linear(8, 8)
        self.places = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(x) + self.mixed(self.places[: x.shape[0]]).tanh()


def traced_tables() -> Made:
    """Tables of other lengths beside the same weights."""
    return Positions(), lambda length: (torch.randn(length, 8),)


class Recurrent(nn.Module):
    """A hidden state that calls pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.mixed = nn.Linear(16, 8), nn.Linear(8, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 16) -> (batch, 8)."""
        return self.read(x).tanh()

    def step(self, hidden: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, 8), (batch, 16) -> the next hidden, and a number for each row."""
        following = (self.mixed(hidden) + self.read(x)).tanh()
        return following, following.sum(1)


def traced_chains() -> Made:
    """fp32: what one entry gives, the other takes where it lies."""

    def rows(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 16),)

    def stepped(batch: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(batch, 8), torch.randn(batch, 16)

    return Recurrent(), {"encode": rows, "step": stepped}


cpu_chains = traced_chains


def perceptron() -> nn.Module:
    """16 -> 32 -> 4."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
