"""Memory that a call shares with its caller or with the next call: buffers and inputs that are written to, overlapping inputs,
numbers among the inputs, outputs that are inputs or weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..case import case, rows, two

_case = partial(case, kind="memory")


class _Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 6, 8))


class CacheInABuffer(_Cache):
    """forward() writes to a KV cache in a buffer, at a position that is an input."""

    def forward(self, key: Tensor, position: Tensor) -> Tensor:
        self.keys.index_copy_(1, position, key)
        return self.keys.sum(1)


class CacheInAnInput(nn.Module):
    """The caller's KV cache is written in place."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[:, -1] = x[:, 0]
        return cache.sum(1)


class CacheReturned(nn.Module):
    """A KV cache that is an input and an output."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        grown = torch.cat([cache[:, 1:], x[:, :1]], dim=1)
        return grown.mean(1), grown


class PagedCache(nn.Module):
    """Keys gathered through a block table."""

    def forward(self, query: Tensor, pages: Tensor, table: Tensor) -> Tensor:
        keys = pages[table].flatten(1, 2)
        return torch.einsum("bd,btd->bt", query, keys).softmax(-1)


class StepCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x / self.steps


class BatchNormInTraining(nn.Module):
    """Running statistics are updated when model.eval() is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class BatchNorm(BatchNormInTraining):
    """The same model after model.eval()."""


class WriteToInput(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * 2


class WriteToViewOfInput(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.view(-1)[:2].zero_()
        return x + y


class WriteToCopyOfInput(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.clone().add_(y).mul_(2)


class WriteInPlace(nn.Module):
    """Writes to its own intermediate values."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).relu_().clamp_(max=2)


class ExpandedInput(nn.Module):
    """One row for the whole batch, expanded without a copy."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def expanded(batch: int) -> tuple[Tensor]:
    """float32 [batch, 8], every row in the same memory."""
    return (torch.randn(1, 8).expand(batch, 8),)


class ExpandedInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[:1].expand(x.shape[0], 8)


class OverlappingWindows(nn.Module):
    """Overlapping frames of a signal with nonzero strides; every call copies them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def windows(batch: int) -> tuple[Tensor]:
    """float32 [batch, 8], each row 4 samples after the previous one."""
    return (torch.randn(4 * batch + 4).as_strided((batch, 8), (4, 1)),)


class TransposedInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def transposed(batch: int) -> tuple[Tensor]:
    """float32 [batch, 8] with contiguous columns."""
    return (torch.randn(8, batch).t(),)


class SharedInputs(nn.Module):
    """One tensor for two parameters."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def shared(batch: int) -> tuple[Tensor, Tensor]:
    """float32 [batch, 8], the same tensor twice."""
    x = torch.randn(batch, 8)
    return x, x


class NumberAmongInputs(nn.Module):
    def forward(self, x: Tensor, scale: float, causal: bool) -> Tensor:
        return x * scale if causal else x


def with_numbers(batch: int) -> tuple[Any, ...]:
    """float32 [batch, 8], a float, a bool."""
    return torch.randn(batch, 8), 0.5, True


class NestedInputs(nn.Module):
    def forward(self, x: Tensor, state: dict[str, list[Tensor]]) -> Tensor:
        return x + state["past"][0]


def nested(batch: int) -> dict[str, Any]:
    """float32 [batch, 8] twice, one in a dict of lists."""
    return {"x": torch.randn(batch, 8), "state": {"past": [torch.randn(batch, 8)]}}


class ReturnInput(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.relu()


class ReturnViewOfInput(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :4], x.relu()


class ReturnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, self.weight


class ReturnTwice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu()
        return y, y


class ReturnViews(nn.Module):
    """Returns views of its own value."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.exp().chunk(2, dim=1)


class ReturnTransposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp().t()


class ReturnExpanded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand(-1, 8)


def keys() -> tuple[Tensor, Tensor]:
    """A key, float32 [1, 1, 8], and its position, int64 [1]."""
    return torch.randn(1, 1, 8), torch.tensor([3])


def cached(batch: int) -> tuple[Tensor, Tensor]:
    """float32 [batch, 1, 8] and a cache, float32 [batch, 6, 8]."""
    return torch.randn(batch, 1, 8), torch.randn(batch, 6, 8)


def paged(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """A query, float32 [batch, 8], pages, float32 [7, 4, 8], and each sequence's pages, int64 [batch, 2]."""
    return torch.randn(batch, 8), torch.randn(7, 4, 8), torch.randint(0, 7, (batch, 2))


CASES = (
    _case(CacheInABuffer, keys, "mutated-buffer"),
    _case(CacheInAnInput, cached, "mutated-input"),
    _case(CacheReturned, cached, near=("mutated-input",)),
    _case(PagedCache, paged, near=("data-dependent-select",)),
    _case(StepCounter, rows, "mutated-buffer"),
    _case(BatchNormInTraining, rows, "mutated-buffer", "training-mode", training=True),
    _case(BatchNorm, rows, near=("mutated-buffer", "training-mode")),
    _case(WriteToInput, two, "mutated-input"),
    _case(WriteToViewOfInput, two, "mutated-input"),
    _case(WriteToCopyOfInput, two, near=("mutated-input",)),
    _case(WriteInPlace, rows, near=("mutated-input",)),
    _case(ExpandedInput, expanded, "overlapping-input"),
    _case(ExpandedInside, rows, near=("overlapping-input",)),
    _case(OverlappingWindows, windows, near=("overlapping-input",)),
    _case(TransposedInput, transposed, near=("overlapping-input",)),
    _case(SharedInputs, shared, "overlapping-input"),
    _case(NumberAmongInputs, with_numbers, "non-tensor-input"),
    _case(NestedInputs, nested, near=("non-tensor-input",)),
    _case(ReturnInput, rows, "aliased-output"),
    _case(ReturnViewOfInput, rows, "aliased-output"),
    _case(ReturnWeight, rows, "aliased-output"),
    _case(ReturnTwice, rows, near=("aliased-output",)),
    _case(ReturnViews, rows, near=("aliased-output",)),
    _case(ReturnTransposed, rows, near=("aliased-output",)),
    _case(ReturnExpanded, rows, near=("aliased-output",)),
)
