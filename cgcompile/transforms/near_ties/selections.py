"""Operators that select elements of a tensor of floats by their order, and when other indices are as good as theirs.

An index is as good where the float that it points at is within tolerance of the one at the expected index, rank by rank.  Ranks of
one row never share an index.  A draw from a cumulative distribution is as good where the drawn number is within tolerance of the
interval that was chosen.  A comparison may come out either way where both sides are within tolerance of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten

NONE = -1
"""In place of an index: nobody asked for another one than eager PyTorch's."""


class Selection(Protocol):
    """What an operator selected."""

    @property
    def expected(self) -> Tensor:
        """Eager PyTorch's indices, int64 (rows, ranks)."""

    def chosen(self, wanted: Tensor, bound: float) -> Tensor:
        """The indices to go on with, (rows, ranks): the `wanted` ones where they are as good, else the expected ones.  NONE wants
        nothing.  `bound`: the largest allowed error of the floats."""

    def alternatives(self, bound: float) -> list[tuple[float, int, int, int]]:
        """Other indices that are as good, closest first: (distance as a part of what is allowed, row, rank, index)."""

    def ties(self, bound: float) -> Tensor:
        """Which of the expected indices have another one that is as good, bool (rows, ranks)."""

    def results(self, chosen: Tensor) -> Any:
        """What the operator gives for these indices."""

    def indices_of(self, result: Any) -> Tensor:
        """The tensor of indices among what the operator gives."""

    def shaped(self, flat: Tensor) -> Tensor:
        """A number for each index, (rows, ranks), laid out as the operator's indices are."""

    def rows(self, values: Tensor) -> Tensor | None:
        """A number for each float that is selected from, as (rows, n); None where they are no operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """Indices into rows of floats.  `values` (rows, n); `distinct`: no two ranks of a row share one; `ordered`: rank by rank.

    `result`: the operator's; `place` its tensor of indices, `at` that of the floats there, None where it gives none; `axis` is the
    axis of the ranks, None where it has been reduced away, and `along` that of the operand, None for all of its elements."""

    values: Tensor
    expected: Tensor
    distinct: bool
    ordered: bool
    result: Any
    place: int | None
    at: int | None
    axis: int | None
    along: int | None

    def chosen(self, wanted: Tensor, bound: float) -> Tensor:
        asked = torch.where(wanted == NONE, self.expected, wanted)
        if self.distinct:
            asked = _completed(asked, wanted, self.expected)
        fine = self._fine(asked, bound)
        if self.distinct:
            fine = fine.all(1, keepdim=True)
        return torch.where(fine, asked, self.expected)

    def alternatives(self, bound: float) -> list[tuple[float, int, int, int]]:
        limits = self._limits(bound)
        wanted = self.values.gather(1, self.expected)
        candidates: list[tuple[float, int, int, int]] = []
        last = self.expected.shape[1] - 1
        for rank in {0, last} if not self.distinct else {last}:
            distance = (self.values - wanted[:, rank : rank + 1]).abs() / limits[:, rank : rank + 1].clamp(min=1e-300)
            distance = distance.scatter(1, self.expected, float("inf")).nan_to_num(nan=float("inf"))
            near, index = distance.topk(min(2, distance.shape[1]), largest=False)
            candidates += _listed(near, index, rank)
        if self.distinct and last > 0:
            apart = (wanted[:, 1:] - wanted[:, :-1]).abs() / limits[:, 1:].clamp(min=1e-300)
            for rank in range(min(last, 64)):
                candidates += _listed(apart[:, rank : rank + 1], self.expected[:, rank + 1 : rank + 2], rank)
        return sorted(candidates)

    def ties(self, bound: float) -> Tensor:
        ordered, order = self.values.double().sort(1)
        alike = (ordered[:, 1:] == ordered[:, :-1]) | (ordered[:, 1:].isnan() & ordered[:, :-1].isnan())
        apart = torch.where(alike, 0.0, (ordered[:, 1:] - ordered[:, :-1]).nan_to_num(nan=float("inf"), posinf=float("inf")))
        end = apart.new_full((apart.shape[0], 1), float("inf"))
        nearest = torch.minimum(torch.cat([end, apart], 1), torch.cat([apart, end], 1))  # of neighbours in order one is nearest
        return torch.empty_like(nearest).scatter(1, order, nearest).gather(1, self.expected) <= self._limits(bound)

    def results(self, chosen: Tensor) -> Any:
        indices = self.shaped(chosen)
        if self.place is None:
            return indices
        outputs = list(self.result)
        outputs[self.place] = indices
        if self.at is not None:
            outputs[self.at] = self.shaped(self.values.gather(1, chosen)).to(self.result[self.at].dtype)
        return tuple(outputs)

    def rows(self, values: Tensor) -> Tensor:
        return _by_row(values, self.along)

    def indices_of(self, result: Any) -> Tensor:
        indices: Tensor = result if self.place is None else result[self.place]
        return indices

    def shaped(self, flat: Tensor) -> Tensor:
        like = self.indices_of(self.result)
        if self.axis is None or like.dim() == 0:
            return flat.reshape(like.shape)
        moved = like.movedim(self.axis, -1)
        return flat.reshape(moved.shape).movedim(-1, self.axis).contiguous()

    def _fine(self, asked: Tensor, bound: float) -> Tensor:
        count = self.values.shape[1]
        inside = (asked >= 0) & (asked < count)
        want, got = self.values.gather(1, self.expected), self.values.gather(1, asked.clamp(0, max(0, count - 1)))
        limits = self._limits(bound)
        if not self.ordered:
            want, got = want.sort(1).values, got.sort(1).values
            limits = limits.amax(1, keepdim=True)
        alike = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= limits)
        return inside & alike & (_distinct(asked) if self.distinct else True)

    def _limits(self, bound: float) -> Tensor:
        return bound * _magnitudes(self.values.gather(1, self.expected))


@dataclass(frozen=True, kw_only=True, slots=True)
class _One:
    """A selection by an operator that gives its indices alone, in the `result`."""

    result: Tensor

    def results(self, chosen: Tensor) -> Tensor:
        return self.shaped(chosen).to(self.result.dtype)

    def indices_of(self, result: Tensor) -> Tensor:
        return result

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(self.result.shape)

    def rows(self, values: Tensor) -> None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval(_One):
    """Where numbers lie among ascending ones: `edges` (rows, n), `numbers` (rows, ranks), as float64.  The index counts the edges
    below a number.  An interval without width is never as good."""

    edges: Tensor
    numbers: Tensor
    expected: Tensor

    def chosen(self, wanted: Tensor, bound: float) -> Tensor:
        asked = torch.where(wanted == NONE, self.expected, wanted)
        count = self.edges.shape[1]
        inside = (asked >= 0) & (asked <= count)
        infinite = self.edges.new_full((self.edges.shape[0], 1), float("inf"))
        padded = torch.cat([-infinite, self.edges, infinite], 1)
        low = padded.gather(1, asked.clamp(0, count))
        high = padded.gather(1, asked.clamp(0, count) + 1)
        limit = bound * _finite(self.edges).amax(1, keepdim=True)
        fine = inside & (self.numbers >= low - limit) & (self.numbers <= high + limit) & (low < high)
        return torch.where(fine, asked, self.expected)

    def alternatives(self, bound: float) -> list[tuple[float, int, int, int]]:
        limit = (bound * _finite(self.edges).amax(1, keepdim=True)).clamp(min=1e-300)
        candidates: list[tuple[float, int, int, int]] = []
        for step, edge in ((-1, self.expected - 1), (1, self.expected)):
            there = self.edges.gather(1, edge.clamp(0, self.edges.shape[1] - 1))
            apart = ((self.numbers - there).abs() / limit).masked_fill((edge < 0) | (edge >= self.edges.shape[1]), float("inf"))
            for rank in range(apart.shape[1]):
                candidates += _listed(apart[:, rank : rank + 1], (self.expected + step)[:, rank : rank + 1], rank)
        return sorted(candidates)

    def ties(self, bound: float) -> Tensor:
        infinite = self.edges.new_full((self.edges.shape[0], 1), float("inf"))
        padded = torch.cat([-infinite, self.edges, infinite], 1)
        apart = [(self.numbers - padded.gather(1, self.expected + edge)).abs() for edge in (0, 1)]
        return torch.minimum(*apart) <= bound * _finite(self.edges).amax(1, keepdim=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(_One):
    """Which of two floats is larger, element by element: `expected`, bool (1, elements), and whether they are `near` each other."""

    expected: Tensor
    apart: Tensor
    size: Tensor

    def chosen(self, wanted: Tensor, bound: float) -> Tensor:
        turned = (wanted != NONE) & (self.apart <= bound * self.size).reshape(wanted.shape)
        return torch.where(turned, wanted == 1, self.expected)

    def alternatives(self, bound: float) -> list[tuple[float, int, int, int]]:
        return []  # too many: they are turned over where a filter explains a choice

    def ties(self, bound: float) -> Tensor:
        return (self.apart <= bound * self.size).reshape(self.expected.shape)


def selection_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Selection | None:
    """What an operator selected by the order of floats; None of any other operator."""
    if func in _BY_ROW:
        place, at, distinct, default = _BY_ROW[func]
        values = args[0]
        named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        axis = named.get("dim", default)
        indices = result if place is None else result[place]
        if not values.is_floating_point() or not values.numel() or not indices.numel():
            return None
        along = None if axis is None or values.dim() == 0 else axis % values.dim()
        rows, kept = _by_row(values, along), distinct or named.get("keepdim", False)
        if along is None:
            expected = indices.reshape(1, -1)
        else:
            expected = (indices.movedim(along, -1) if kept else indices.unsqueeze(-1)).reshape(rows.shape[0], -1)
        return Ranked(
            values=rows, expected=expected, distinct=distinct, ordered=bool(named.get("sorted", True)), result=result, place=place,
            at=at, axis=along if kept else None, along=along,
        )  # fmt: skip
    if func is aten.searchsorted.Tensor and args[0].is_floating_point() and args[0].numel() and kwargs.get("sorter") is None:
        edges = args[0].reshape(-1, args[0].shape[-1]).double()
        numbers = args[1].reshape(edges.shape[0] if args[0].dim() > 1 else 1, -1).double()
        return Interval(edges=edges, numbers=numbers, expected=result.reshape(numbers.shape).long(), result=result)
    return None


def compared(one: Tensor, other: Any, result: Tensor) -> Selection | None:
    """The comparison of two tensors of floats; None of anything else."""
    if not (isinstance(other, Tensor) and one.is_floating_point() and other.is_floating_point() and result.numel()):
        return None
    apart, size = (one - other).abs(), torch.maximum(one.abs(), other.abs())
    return Comparison(expected=result.reshape(1, -1), apart=apart, size=size, result=result)


def counted_below(compared: tuple[Any, Tensor, Tensor], axis: int, result: Tensor) -> Selection | None:
    """What the sum of a comparison along an axis selected: the number of ascending floats that are below another one.  None of
    any other sum.  `compared`: the operator, and what it compares."""
    func, one, other = compared
    if func not in (aten.le.Tensor, aten.lt.Tensor):
        one, other = other, one
    if not (one.is_floating_point() and other.is_floating_point()):
        return None
    edges, numbers = [tensor.movedim(axis, -1) for tensor in torch.broadcast_tensors(one, other)]
    if not edges.numel() or bool((edges[..., 1:] < edges[..., :-1]).any()) or bool((numbers != numbers[..., :1]).any()):
        return None
    edges, numbers = edges.reshape(-1, edges.shape[-1]).double(), numbers[..., 0].reshape(-1, 1).double()
    return Interval(edges=edges, numbers=numbers, expected=result.reshape(-1, 1).long(), result=result)


COMPARISONS = frozenset({aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor})
"""What `counted_below` knows."""

_BY_ROW: dict[Any, tuple[int | None, int | None, bool, int | None]] = {
    aten.argmax.default: (None, None, False, None),
    aten.argmin.default: (None, None, False, None),
    aten.max.dim: (1, 0, False, None),
    aten.min.dim: (1, 0, False, None),
    aten.median.dim: (1, 0, False, None),
    aten.nanmedian.dim: (1, 0, False, None),
    aten.mode.default: (1, 0, False, -1),
    aten.kthvalue.default: (1, 0, False, -1),
    aten.topk.default: (1, 0, True, -1),
    aten.sort.default: (1, 0, True, -1),
    aten.sort.stable: (1, 0, True, -1),
}
"""By operator: which result has the indices, None where it gives them alone, and which the floats; whether a row's indices are
distinct; the axis where none is given."""


def _by_row(values: Tensor, along: int | None) -> Tensor:
    """(rows, n): the elements along an axis, or all of them."""
    if along is None:
        return values.reshape(1, -1)
    moved = values.movedim(along, -1)
    return moved.reshape(-1, moved.shape[-1])


def _magnitudes(values: Tensor) -> Tensor:
    """How large the floats around each are, (rows, ranks): masks at one end of a row are left out for the rest of it, and a row
    of small floats counts as the median row does."""
    finite = _finite(values)
    magnitudes = torch.minimum(finite.cummax(1).values, finite.flip(1).cummax(1).values.flip(1))
    return torch.maximum(magnitudes, magnitudes.median(0, keepdim=True).values)


def _finite(values: Tensor) -> Tensor:
    return values.double().abs().nan_to_num(nan=0.0, posinf=0.0)


def _distinct(indices: Tensor) -> Tensor:
    """(rows, 1): whether no two indices of a row are the same."""
    ordered = indices.sort(1).values
    return (ordered[:, 1:] != ordered[:, :-1]).all(1, keepdim=True)


def _completed(asked: Tensor, wanted: Tensor, expected: Tensor) -> Tensor:
    """`asked`, with the ranks that nobody asked for filled by the expected indices that no other rank took, in their order."""
    open_rows = ((wanted == NONE).any(1) & (asked != expected).any(1)).nonzero().reshape(-1).tolist()
    indices = asked.clone()
    for row in open_rows:
        free = wanted[row] == NONE
        taken = set(wanted[row][~free].tolist())
        rest = [index for index in expected[row].tolist() if index not in taken]
        indices[row][free] = torch.tensor(rest[: int(free.sum())], dtype=indices.dtype, device=indices.device)
    return indices


def _listed(distance: Tensor, index: Tensor, rank: int) -> list[tuple[float, int, int, int]]:
    """(distance, row, rank, index) of what is within what is allowed."""
    near = (distance <= 1).nonzero().tolist()
    return [(float(distance[row, at]), row, rank, int(index[row, at])) for row, at in near]
