"""Models whose Python asks for values, and whose results have as many rows as data selects."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Detector(nn.Module):
    """Nothing detected is an early return of constant size; a sum of what is detected."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [n, 4]."""
        scores = x[:, 0].sigmoid()
        kept = x[scores > 0.6]
        if kept.shape[0] == 0:
            return torch.empty(0, 4), torch.empty(0), torch.zeros(())
        scores = kept[:, 1].exp()
        return kept * 2, scores[scores > 1], kept.sum()


class Two(nn.Module):
    """Ways that select by other masks, and meet again."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0] if x.sum() > 0 else x[x[:, 1] < 0.5]
        if x[0, 0] > 0:
            kept = kept + 1
        return kept.softmax(0), (kept[:, 0] > 0).nonzero()


class Measured(nn.Module):
    """`len()` of selected rows, `repeat()` beside them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0]
        if len(kept) > 1:
            kept = kept[:5]
            return kept.repeat(1, 2), kept[:, :1].repeat(1, 8)
        return torch.cat([kept, kept], 1), torch.cat([kept, kept], 1)


class Halves(nn.Module):
    """Two groups of selected rows go through a layer as one, as feature matchers do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        rows, columns = torch.where(x > 0.5)
        if rows.shape[0] == 0:
            return torch.empty(0, 4), torch.empty(0)
        first, second = torch.chunk(self.layer(torch.cat([x[rows], x[(rows + 1) % x.shape[0]]])), 2, dim=0)
        return first.view(rows.shape[0], -1) - second, torch.einsum("mc,mc->m", first, second) + columns


class Sliced(nn.Module):
    """As many rows of a selection as a selection among these has; one mask is computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0]
        some, same = kept[kept[:, 1] > 0], kept[kept[:, 1] > 0]
        if x.sum() > 0:
            return some + kept[: some.shape[0]]
        return some + kept[: len(same)] * 2


class Swapped(nn.Module):
    """The ways select the same two groups, in another order: torch gives their sizes the same names."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        first, second = x[:, 0] > 0, x[:, 1] > 0
        if x.sum() > 0:
            kept = x[first.clone()]
            x[second]
        else:
            kept = x[second]
            x[first.clone()]
        if x[1, 0] > 0:
            return kept * 2
        return kept


class SwappedNumbers(nn.Module):
    """The same, where only the number of rows is kept."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        first, second = x[:, 0] > 0, x[:, 1] > 0
        if x.sum() > 0:
            rows = x[first.clone()].shape[0]
            x[second]
        else:
            rows = x[second].shape[0]
            x[first.clone()]
        y = x.sum(0)
        if x[1, 0] > 0:
            return y * 2 + rows
        return y / (rows + 1)


class Whole(nn.Module):
    """One way gives all rows, the other one those that a mask selects; truth values too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        if x[0, 0] > 0:
            return x * 2, x[:, 0] > 1
        kept = x[x[:, 1] > 0]
        return kept, kept[:, 0] > 1


class Shrinking(nn.Module):
    """Rows are selected again and again, until none is left."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        kept = x
        for _ in range(3):
            if kept.shape[0] == 0:
                break
            kept = kept[kept[:, 0] > kept[:, 0].mean()]
        return kept


class Products(nn.Module):
    """A result with two such axes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0]
        if len(kept) < 2:
            return torch.zeros(0, 0), kept
        return kept @ kept.T, kept.flip(1)


class Twice(nn.Module):
    """Several selections, each behind a question."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [n, 4]."""
        one = x[x[:, 0] > 0] * 2 if x.sum() > 0 else torch.empty(0, 4)
        other = x[x[:, 1] > 0] if x[0, 0] > 0 else x[x[:, 2] > 0]
        return one, other, torch.cat([one, other])


class Unasked(nn.Module):
    """No question: `len()` alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0]
        return kept * 2, x / (len(kept) + 1)


class Sums(nn.Module):
    """Letters of `einsum` that stand for selected rows: kept, and summed over."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0]
        if kept.shape[0] > 1:
            kept = torch.einsum("nk,kd->nd", torch.einsum("nd,kd->nk", kept, kept + 1), kept)
        return kept, torch.einsum("nc, nd -> cd", kept, kept + 1)


class Strongest(nn.Module):
    """The three largest of what a mask selects, where there are more, in their order; `nan` is the largest."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [n, 4]."""
        mask = x > 0
        scores, places = x[mask], mask.nonzero()
        if scores.numel() > 3:
            least, _ = torch.kthvalue(-scores, 3)
            keep = scores >= -least
            scores, places = scores[keep], places[keep]
        return scores, places.flip((1,))


class Groups(nn.Module):
    """As many groups as the size says, which Python counts: a program for each size, with every way."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        groups = []
        for group in range(x.shape[0] // 3):
            rows = x[3 * group : 3 * group + 3]
            kept = rows[rows[:, 0] > 0]
            groups.append(kept if len(kept) < 2 else kept[:2] * 2)
        return torch.cat(groups)


class Flipped(nn.Module):
    """Rows in another order, whose place depends on how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0]
        return kept if len(kept) < 2 else kept.flip(0)


class Ambiguous(nn.Module):
    """A view that PyTorch refuses where nothing is selected, behind where the ways met."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        kept = x[x[:, 0] > 0]
        rows = kept.shape[0]
        if rows > 0:
            x = x + 1
        if x[0, 0] > 0.3:
            x = x * 2
        return x + kept.reshape(rows, -1, 2).sum()


class Sized(nn.Module):
    """A number that the model computes is the size of a tensor, behind a question that is followed."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        if x.sum() > 0:
            x = x + 1
        count = int((x > 0).sum())
        return torch.tril_indices(count, count).sum() + x


class Suppressing(nn.Module):
    """Boxes in Python's own loop."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        order, kept = x[:, 0].argsort(descending=True), []
        while order.shape[0] > 0:
            kept.append(order[0])
            rest = order[1:]
            order = rest[(x[rest] - x.index_select(0, order[:1])).abs().sum(1) > 1]
        return torch.stack(kept)


class Constant(nn.Module):
    """A way gives more rows than any selection may have."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [n, 4]."""
        return torch.zeros(20, 4) if x.sum() > 0 else x[x[:, 0] > 0]
