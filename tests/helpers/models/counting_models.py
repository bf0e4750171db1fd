"""Models of `x` [n, 4] whose Python code reads tensor values, and whose outputs have a number of rows that depends on data."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Detector(nn.Module):
    """Returns constant, empty outputs early if nothing is selected; also returns a sum over the selected rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = x[:, 0].sigmoid()
        kept = x[scores > 0.6]
        if kept.shape[0] == 0:
            return torch.empty(0, 4), torch.empty(0), torch.zeros(())
        scores = kept[:, 1].exp()
        return kept * 2, scores[scores > 1], kept.sum()


class Two(nn.Module):
    """Branches that select by different masks and then join."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[x[:, 0] > 0] if x.sum() > 0 else x[x[:, 1] < 0.5]
        if x[0, 0] > 0:
            kept = kept + 1
        return kept.softmax(0), (kept[:, 0] > 0).nonzero()


class Measured(nn.Module):
    """Uses `len()` and `repeat()` on selected rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[x[:, 0] > 0]
        if len(kept) > 1:
            kept = kept[:5]
            return kept.repeat(1, 2), kept[:, :1].repeat(1, 8)
        return torch.cat([kept, kept], 1), torch.cat([kept, kept], 1)


class Halves(nn.Module):
    """Runs two groups of selected rows through one layer call, as feature matchers do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = torch.where(x > 0.5)
        if rows.shape[0] == 0:
            return torch.empty(0, 4), torch.empty(0)
        first, second = torch.chunk(self.layer(torch.cat([x[rows], x[(rows + 1) % x.shape[0]]])), 2, dim=0)
        return first.view(rows.shape[0], -1) - second, torch.einsum("mc,mc->m", first, second) + columns


class Sliced(nn.Module):
    """Slices a selection to the size of a selection from it. One mask is computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        some, same = kept[kept[:, 1] > 0], kept[kept[:, 1] > 0]
        if x.sum() > 0:
            return some + kept[: some.shape[0]]
        return some + kept[: len(same)] * 2


class Swapped(nn.Module):
    """Branches that make the same two selections in a different order: torch gives their sizes the same names."""

    def forward(self, x: Tensor) -> Tensor:
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
    """A model like `Swapped`, of which only the number of rows is used."""

    def forward(self, x: Tensor) -> Tensor:
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
    """One branch returns all rows, the other one the rows that a mask selects; one output is bool."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x[0, 0] > 0:
            return x * 2, x[:, 0] > 1
        kept = x[x[:, 1] > 0]
        return kept, kept[:, 0] > 1


class Shrinking(nn.Module):
    """Selects rows repeatedly until no row is left."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for _ in range(3):
            if kept.shape[0] == 0:
                break
            kept = kept[kept[:, 0] > kept[:, 0].mean()]
        return kept


class Products(nn.Module):
    """An output with two data-dependent axes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[x[:, 0] > 0]
        if len(kept) < 2:
            return torch.zeros(0, 0), kept
        return kept @ kept.T, kept.flip(1)


class Twice(nn.Module):
    """Several selections, each after a branch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = x[x[:, 0] > 0] * 2 if x.sum() > 0 else torch.empty(0, 4)
        other = x[x[:, 1] > 0] if x[0, 0] > 0 else x[x[:, 2] > 0]
        return one, other, torch.cat([one, other])


class Unasked(nn.Module):
    """Uses `len()` of a selection without a branch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[x[:, 0] > 0]
        return kept * 2, x / (len(kept) + 1)


class Sums(nn.Module):
    """`einsum` over a data-dependent axis, which is kept or summed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[x[:, 0] > 0]
        if kept.shape[0] > 1:
            kept = torch.einsum("nk,kd->nd", torch.einsum("nd,kd->nk", kept, kept + 1), kept)
        return kept, torch.einsum("nc, nd -> cd", kept, kept + 1)


class Strongest(nn.Module):
    """The three largest selected values, in their original order, if more are selected; NaN counts as the largest."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > 0
        scores, places = x[mask], mask.nonzero()
        if scores.numel() > 3:
            least, _ = torch.kthvalue(-scores, 3)
            keep = scores >= -least
            scores, places = scores[keep], places[keep]
        return scores, places.flip((1,))


class Groups(nn.Module):
    """Python computes the number of groups from the size, so every size has its own program, with all paths."""

    def forward(self, x: Tensor) -> Tensor:
        groups = []
        for group in range(x.shape[0] // 3):
            rows = x[3 * group : 3 * group + 3]
            kept = rows[rows[:, 0] > 0]
            groups.append(kept if len(kept) < 2 else kept[:2] * 2)
        return torch.cat(groups)


class Flipped(nn.Module):
    """Reverses the selected rows: the new position of a row depends on their number."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        return kept if len(kept) < 2 else kept.flip(0)


class Ambiguous(nn.Module):
    """A reshape that PyTorch rejects for an empty selection, after two branches have joined."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        rows = kept.shape[0]
        if rows > 0:
            x = x + 1
        if x[0, 0] > 0.3:
            x = x * 2
        return x + kept.reshape(rows, -1, 2).sum()


class Sized(nn.Module):
    """After a branch that is traced, a number computed from data is the size of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        count = int((x > 0).sum())
        return torch.tril_indices(count, count).sum() + x


class Suppressing(nn.Module):
    """Non-maximum suppression of boxes in a Python loop."""

    def forward(self, x: Tensor) -> Tensor:
        order, kept = x[:, 0].argsort(descending=True), []
        while order.shape[0] > 0:
            kept.append(order[0])
            rest = order[1:]
            order = rest[(x[rest] - x.index_select(0, order[:1])).abs().sum(1) > 1]
        return torch.stack(kept)


class Constant(nn.Module):
    """One branch returns more rows than any selection can have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(20, 4) if x.sum() > 0 else x[x[:, 0] > 0]
