"""Models that select rows inside a Python branch, compute with them, and write them back. They take `x` [n, 4]."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Spline(nn.Module):
    """Applies a function to values inside an interval and keeps the others, as spline flows do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, slope = x.clone(), torch.zeros_like(x)
        inside = (x > -1) & (x < 1)
        if torch.any(inside):
            y[inside], slope[inside] = self.spline(x[inside], x.unsqueeze(-1).repeat(1, 1, 3)[inside, :])
        return y, slope.sum(-1)

    def spline(self, a: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`a` [k], `h` [k, 3]."""
        if torch.min(a) < -1 or torch.max(a) > 1:
            raise ValueError("outside")
        assert a.shape[0] == h.shape[0]
        bins = torch.cumsum(torch.softmax(h * torch.tensor([1.0, 2.0, 3.0]), -1), -1)
        bins = nn.functional.pad(2 * bins - 1, (1, 0), value=-1.0)
        bins[..., 0], bins[..., -1] = -1.0, 1.0
        place = torch.searchsorted(bins, a[..., None]) - 1
        assert torch.all(place >= 0)
        left, right = bins.gather(-1, place), bins.gather(-1, place + 1)
        part = (a[..., None] - left) / (right - left)
        return (left + part**2 * (right - left)).view(-1), torch.log(part.view(-1) + 1e-3)


class Experts(nn.Module):
    """Sends rows to the expert that a gate picks, and adds the results to the original rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        best, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().view(-1)
            if rows.shape[0] > 0:
                out.index_add_(0, rows, expert(x.index_select(0, rows)) * weights[rows, number : number + 1])
        return out


class Assigned(Experts):
    """A model like `Experts`, with index assignments and an early `continue`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(best == number)
            if rows.numel() == 0:
                continue
            out[rows] = expert(x[rows]) + out[rows]
        return out


class Summed(nn.Module):
    """Sums, means and extremes of the selected rows, if there are at least two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[x[:, 0] > 0]
        if chosen.size(0) > 1:
            x = x + chosen.mean(0) + chosen.max() - chosen.sum() + chosen.mean() + chosen.min()
        return x


class Mixed(nn.Module):
    """Normalizes the selected rows among themselves: they mix with each other, but must not mix with the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[:, 1] > 0
        if mask.any():
            chosen = x[mask]
            y = x.clone()
            y[mask] = torch.softmax(chosen, 0) + torch.cumsum(chosen, 0) + chosen.sum(0, keepdim=True)
            return y
        return x


class Shifted(nn.Module):
    """Writes the rows of one mask to the rows of another mask with the same count. The build cannot prove that the counts match."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[:, 1] > 0
        if mask.any():
            y, other = x.clone(), mask.flip(0)
            y[other] = x[mask] * 2
            return y
        return x


class Kept:
    """An object among the attributes of a model."""

    last: torch.Tensor | None = None


class Remembers(nn.Module):
    """Stores a result in an object and only reads it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.last = x * 2
        if x.sum() > 0:
            return self.kept.last + 1
        return self.kept.last - 1


class Put(nn.Module):
    """Writes to data-dependent rows; there may be none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > -1e9:
            rows, y = (x[:, 0] > 0).nonzero()[:, 0], x.clone()
            y[rows + (x[0, 1] > 0).long()] = x[rows] * 2 + 1
            return y
        return x


class Added(nn.Module):
    """Adds to data-dependent rows; a negative index is rejected here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > -1e9:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            return x.index_add(0, rows - (x[0, 1] > 0).long(), x[rows])
        return x


class Head(nn.Module):
    """The end of a detector: selections by one mask, a selection that is returned twice, `unique`, and an output of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.scores = nn.Linear(4, 3)

    def forward(self, boxes: torch.Tensor) -> dict[str, Any]:
        """`boxes` [n, 4]."""
        scores, labels = self.scores(boxes).sigmoid().max(1)
        keep = scores > 0.55
        kept, order = boxes[keep], scores[keep].argsort(descending=True, stable=True)
        unique, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        return {
            "boxes": kept, "again": kept, "best": kept[order][:50], "scores": scores[keep], "rows": keep.nonzero(),
            "labels": (unique, inverse, counts), "pairs": ((kept[:, None] > kept[None]).all(-1)).sum(1), "all": scores,
        }  # fmt: skip

    def largest(self, boxes: torch.Tensor) -> torch.Tensor:
        """A second entry, without data-dependent sizes."""
        return boxes.amax(0)


def boxes(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4),)
