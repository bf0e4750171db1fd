"""Sizes that depend on data: routing, filtering, counting; and alternatives with fixed sizes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import boxes, case, rows, sequences, tokens, two

_case = partial(case, kind="shapes")

SHAPE, FOLLOWER = "data-dependent-shape", "data-dependent-follower"


class MoeRouting(nn.Module):
    """Every expert computes the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = torch.nonzero(choice == index).squeeze(1)
            out = out.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return out


class MoeDense(nn.Module):
    """Every expert computes all tokens, weighted by the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).topk(2)
        gates = torch.zeros(x.shape[0], 4, device=x.device).scatter(1, choice, weight.softmax(-1))
        return torch.einsum("be,eio,bi->bo", gates, self.experts, x)


class MoeSorted(nn.Module):
    """Tokens sorted by expert; all sizes are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        order = choice.argsort(stable=True)
        done = torch.bmm(x[order].unsqueeze(1), self.experts[choice[order]]).squeeze(1)
        return torch.zeros_like(done).index_copy(0, order, done)


class MaskedSelect(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_select(x > 0).mean() + x


class BooleanIndex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum()


class BooleanIndexOfRows(nn.Module):
    """Drops padding rows and projects the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x[x[:, 0] > 0]).sum(0)


class WhereMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.0).sum()


class MaskedFill(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x < 0, float("-inf")).softmax(-1)


class WhereIndices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        row, column = torch.where(x > 0.5)
        return x[row, column].sum() + row.sum()


class Argwhere(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.argwhere(ids == 0).sum(0)


class UniqueTokens(nn.Module):
    """Embeds only distinct tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        distinct, inverse = torch.unique(ids, return_inverse=True)
        return self.embed(distinct)[inverse]


class CollapseRepeats(nn.Module):
    """The last step of greedy CTC decoding."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.unique_consecutive(ids[0]).float().mean()


class RepeatToKnownSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        repeats = torch.full((x.shape[0],), 3, device=x.device)
        return torch.repeat_interleave(x, repeats, dim=0, output_size=3 * x.shape[0])


class RepeatHeads(nn.Module):
    """Repeats keys by a constant, as grouped-query attention does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=1)


class CountByBincount(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids.flatten()).sum()


class CountByScatter(nn.Module):
    """The load of every expert, with a fixed size."""

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.flatten()
        return torch.zeros(16, dtype=torch.int64, device=ids.device).scatter_add(0, flat, torch.ones_like(flat))


class OneHotOfUnknownClasses(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids).sum()


class OneHot(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, num_classes=16).sum(1)


class KeepGoodBoxes(nn.Module):
    """The filter before non-maximum suppression."""

    def forward(self, corners: Tensor, scores: Tensor) -> Tensor:
        kept = corners[scores > 0.5]
        return (kept[:, 2:] - kept[:, :2]).clamp(min=0).prod(-1).sum()


class SuppressByMask(nn.Module):
    """One round of non-maximum suppression with a mask instead of a list."""

    def forward(self, corners: Tensor, scores: Tensor) -> Tensor:
        low = torch.maximum(corners[:, :, None, :2], corners[:, None, :, :2])
        high = torch.minimum(corners[:, :, None, 2:], corners[:, None, :, 2:])
        overlap = (high - low).clamp(min=0).prod(-1)
        better = scores[:, None, :] > scores[:, :, None]
        return scores * ~((overlap > 0.5) & better).any(-1)


class BestBoxes(nn.Module):
    def forward(self, corners: Tensor, scores: Tensor) -> Tensor:
        best = scores.topk(3).indices
        return corners.gather(1, best[..., None].expand(-1, -1, 4))


class TopP(nn.Module):
    """The filter of nucleus sampling, with a mask."""

    def forward(self, logits: Tensor) -> Tensor:
        ordered, order = logits.sort(descending=True)
        mass = ordered.softmax(-1).cumsum(-1)
        cut = (mass > 0.9).roll(1, -1)
        cut[:, 0] = False
        return logits.masked_fill(cut.scatter(1, order, cut), float("-inf"))


class TopPOfOneRow(nn.Module):
    """The filter of nucleus sampling, with a list of the kept tokens."""

    def forward(self, logits: Tensor) -> Tensor:
        ordered = logits[0].sort(descending=True).values
        kept = ordered[ordered.softmax(-1).cumsum(-1) < 0.9]
        return kept.exp().sum()


class DrawByThreshold(nn.Module):
    """Inverse transform sampling with the random numbers as an input."""

    def forward(self, logits: Tensor, noise: Tensor) -> Tensor:
        mass = logits.softmax(-1).cumsum(-1)
        return torch.searchsorted(mass, noise[:, :1].sigmoid()).clamp(max=7)


class ReturnNonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(x > 0)


class CountNonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.count_nonzero(x > 0, dim=1)


class Cumsum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1).flip(0)


class NonzeroOfKnownSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero_static(x > 0, size=4).sum(0)


class SelectAfterNonzero(nn.Module):
    """Sizes are static again after the sum, so that the later operations can be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.before(x).relu()
        total = x[x > 0.1].sum()
        return self.after(y * total)


CASES = (
    _case(MoeRouting, rows, SHAPE, FOLLOWER),
    _case(MoeDense, rows, near=("data-dependent-shape",)),
    _case(MoeSorted, rows, near=("data-dependent-shape",)),
    _case(MaskedSelect, rows, SHAPE, FOLLOWER),
    _case(BooleanIndex, rows, SHAPE, FOLLOWER),
    _case(BooleanIndexOfRows, rows, SHAPE, FOLLOWER),
    _case(WhereMask, rows, near=("data-dependent-shape",)),
    _case(MaskedFill, rows, near=("boolean-index-put",)),
    _case(WhereIndices, rows, SHAPE, FOLLOWER),
    _case(Argwhere, tokens, SHAPE, FOLLOWER),
    _case(UniqueTokens, tokens, SHAPE, FOLLOWER),
    _case(CollapseRepeats, tokens, SHAPE, FOLLOWER),
    _case(RepeatToKnownSize, rows, near=("data-dependent-shape",)),
    _case(RepeatHeads, sequences, near=("data-dependent-shape",)),
    _case(CountByBincount, tokens, SHAPE, FOLLOWER),
    _case(CountByScatter, tokens, near=("data-dependent-shape",)),
    _case(OneHotOfUnknownClasses, tokens, "data-dependent-shape"),
    _case(OneHot, tokens, near=("data-dependent-shape",)),
    _case(KeepGoodBoxes, boxes, SHAPE, FOLLOWER),
    _case(SuppressByMask, boxes, near=("data-dependent-shape",)),
    _case(BestBoxes, boxes, near=("data-dependent-follower",)),
    _case(TopP, rows, near=("data-dependent-shape",)),
    _case(TopPOfOneRow, rows, SHAPE, FOLLOWER),
    _case(DrawByThreshold, two, near=("random-operation",)),
    _case(ReturnNonzero, rows, SHAPE, FOLLOWER),
    _case(CountNonzero, rows, near=("data-dependent-shape",)),
    _case(Cumsum, rows, near=("deterministic-scatter",)),
    _case(NonzeroOfKnownSize, rows, near=("data-dependent-shape",)),
    _case(SelectAfterNonzero, two, SHAPE, FOLLOWER),
)
