"""Operators that select elements of a float tensor by their order, and the conditions for other indices to be as good.

An index is as good if the float at it is within tolerance of the float at the expected index of the same rank.  A rank is a
position among the selected indices of a row.  Ranks of one row never share an index.  A draw from a cumulative distribution is as
good if the drawn number is within tolerance of the chosen interval.  A comparison may have either result if both sides are within
tolerance of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten

NONE = -1
"""Used instead of an index: requests eager PyTorch's index."""


class Selection(Protocol):
    """The selection of an operator."""

    @property
    def expected(self) -> Tensor:
        """Eager PyTorch's indices, int64 (rows, ranks)."""

    def chosen(self, wanted: Tensor, bound: float) -> Tensor:
        """Returns the indices to continue with, (rows, ranks): `wanted` indices (or NONE) that are as good, else the expected ones.
        `bound`: the largest allowed error of the floats."""

    def alternatives(self, bound: float) -> list[tuple[float, int, int, int]]:
        """Returns other indices that are as good, closest first: (distance as a part of the allowed one, row, rank, index)."""

    def ties(self, bound: float) -> Tensor:
        """Returns which of the expected indices have an alternative that is as good, bool (rows, ranks)."""

    def results(self, chosen: Tensor) -> Any:
        """Returns the operator's results for these indices."""

    def indices_of(self, result: Any) -> Tensor:
        """Returns the tensor of indices among the operator's results."""

    def shaped(self, flat: Tensor) -> Tensor:
        """Reshapes a number for each index, (rows, ranks), to the shape of the operator's indices."""

    def rows(self, values: Tensor) -> Tensor | None:
        """Reshapes a tensor of the operand's shape to (rows, n).  Returns None if the operator does not select from rows of an
        operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """Indices into rows of floats, `values` (rows, n).  `distinct`: no two ranks of a row share an index.  `ordered`: the indices
    are compared rank by rank.

    `result`: the operator's results.  `place`, `at`: the positions of the indices and of the floats among them, or None.  `axis`:
    the axis of the ranks, None if it is reduced.  `along`: this axis of the operand, None for all elements."""

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
        requested = torch.where(wanted == NONE, self.expected, wanted)
        if self.distinct:
            requested = _completed(requested, wanted, self.expected)
        accepted = self._fine(requested, bound)
        if self.distinct:
            accepted = accepted.all(1, keepdim=True)
        return torch.where(accepted, requested, self.expected)

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
        nearest = torch.minimum(torch.cat([end, apart], 1), torch.cat([apart, end], 1))  # the nearest is a neighbour in order
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
        indices = self.indices_of(self.result)
        if self.axis is None or indices.dim() == 0:
            return flat.reshape(indices.shape)
        moved = indices.movedim(self.axis, -1)
        return flat.reshape(moved.shape).movedim(-1, self.axis).contiguous()

    def _fine(self, requested: Tensor, bound: float) -> Tensor:
        count = self.values.shape[1]
        inside = (requested >= 0) & (requested < count)
        want, got = self.values.gather(1, self.expected), self.values.gather(1, requested.clamp(0, max(0, count - 1)))
        limits = self._limits(bound)
        if not self.ordered:
            want, got = want.sort(1).values, got.sort(1).values
            limits = limits.amax(1, keepdim=True)
        alike = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= limits)
        return inside & alike & (_distinct(requested) if self.distinct else True)

    def _limits(self, bound: float) -> Tensor:
        return bound * _magnitudes(self.values.gather(1, self.expected))


@dataclass(frozen=True, kw_only=True, slots=True)
class _One:
    """A selection by an operator whose only `result` are the indices."""

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
    """The positions of `numbers` (rows, ranks) among ascending `edges` (rows, n), both as float64.  An index is the number of edges
    below a number.  An interval without width is never as good."""

    edges: Tensor
    numbers: Tensor
    expected: Tensor

    def chosen(self, wanted: Tensor, bound: float) -> Tensor:
        requested = torch.where(wanted == NONE, self.expected, wanted)
        count = self.edges.shape[1]
        inside = (requested >= 0) & (requested <= count)
        infinite = self.edges.new_full((self.edges.shape[0], 1), float("inf"))
        padded = torch.cat([-infinite, self.edges, infinite], 1)
        low = padded.gather(1, requested.clamp(0, count))
        high = padded.gather(1, requested.clamp(0, count) + 1)
        limit = bound * _finite(self.edges).amax(1, keepdim=True)
        accepted = inside & (self.numbers >= low - limit) & (self.numbers <= high + limit) & (low < high)
        return torch.where(accepted, requested, self.expected)

    def alternatives(self, bound: float) -> list[tuple[float, int, int, int]]:
        limit = (bound * _finite(self.edges).amax(1, keepdim=True)).clamp(min=1e-300)
        candidates: list[tuple[float, int, int, int]] = []
        for step, edge in ((-1, self.expected - 1), (1, self.expected)):
            nearest = self.edges.gather(1, edge.clamp(0, self.edges.shape[1] - 1))
            apart = ((self.numbers - nearest).abs() / limit).masked_fill((edge < 0) | (edge >= self.edges.shape[1]), float("inf"))
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
    """A comparison of floats, element by element.  `expected`: bool (1, elements); `apart`: distance; `size`: larger magnitude."""

    expected: Tensor
    apart: Tensor
    size: Tensor

    def chosen(self, wanted: Tensor, bound: float) -> Tensor:
        turned = (wanted != NONE) & (self.apart <= bound * self.size).reshape(wanted.shape)
        return torch.where(turned, wanted == 1, self.expected)

    def alternatives(self, bound: float) -> list[tuple[float, int, int, int]]:
        return []  # too many; a comparison is inverted if a filter explains a choice

    def ties(self, bound: float) -> Tensor:
        return (self.apart <= bound * self.size).reshape(self.expected.shape)


def selection_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Selection | None:
    """Returns the selection of an operator by the order of floats, or None for any other operator."""
    if func in _BY_ROW:
        place, at, distinct, default = _BY_ROW[func]
        values = args[0]
        named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        axis = named.get("dim", default)
        indices = result if place is None else result[place]
        if not values.is_floating_point() or not values.numel() or not indices.numel():
            return None
        along = None if axis is None or values.dim() == 0 else axis % values.dim()
        rows, keeps_axis = _by_row(values, along), distinct or named.get("keepdim", False)
        if along is None:
            expected = indices.reshape(1, -1)
        else:
            expected = (indices.movedim(along, -1) if keeps_axis else indices.unsqueeze(-1)).reshape(rows.shape[0], -1)
        return Ranked(
            values=rows, expected=expected, distinct=distinct, ordered=bool(named.get("sorted", True)), result=result, place=place,
            at=at, axis=along if keeps_axis else None, along=along,
        )  # fmt: skip
    if func is aten.searchsorted.Tensor and args[0].is_floating_point() and args[0].numel() and kwargs.get("sorter") is None:
        edges = args[0].reshape(-1, args[0].shape[-1]).double()
        numbers = args[1].reshape(edges.shape[0] if args[0].dim() > 1 else 1, -1).double()
        return Interval(edges=edges, numbers=numbers, expected=result.reshape(numbers.shape).long(), result=result)
    return None


def compared(one: Tensor, other: Any, result: Tensor) -> Selection | None:
    """Returns the comparison of two float tensors, or None for anything else."""
    if not (isinstance(other, Tensor) and one.is_floating_point() and other.is_floating_point() and result.numel()):
        return None
    apart, size = (one - other).abs(), torch.maximum(one.abs(), other.abs())
    return Comparison(expected=result.reshape(1, -1), apart=apart, size=size, result=result)


def counted_below(compared: tuple[Any, Tensor, Tensor], axis: int, result: Tensor) -> Selection | None:
    """Returns the selection by the sum of a comparison along an axis: the number of ascending floats that are below another one.
    Returns None for any other sum.  `compared`: the operator, and its operands."""
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
"""Comparisons that `counted_below` supports."""

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
"""By operator: the position of the indices among its results, None if they are the only result; the position of the floats; whether
a row's indices are distinct; the default axis."""


def _by_row(values: Tensor, along: int | None) -> Tensor:
    """Returns the elements along an axis, or all of them, as (rows, n)."""
    if along is None:
        return values.reshape(1, -1)
    moved = values.movedim(along, -1)
    return moved.reshape(-1, moved.shape[-1])


def _magnitudes(values: Tensor) -> Tensor:
    """Returns the magnitude of the floats around each float, (rows, ranks).  Masks at one end of a row do not affect the other
    floats.  A row of small floats gets the magnitude of the median row."""
    finite = _finite(values)
    magnitudes = torch.minimum(finite.cummax(1).values, finite.flip(1).cummax(1).values.flip(1))
    return torch.maximum(magnitudes, magnitudes.median(0, keepdim=True).values)


def _finite(values: Tensor) -> Tensor:
    return values.double().abs().nan_to_num(nan=0.0, posinf=0.0)


def _distinct(indices: Tensor) -> Tensor:
    """Returns whether no two indices of a row are the same, (rows, 1)."""
    ordered = indices.sort(1).values
    return (ordered[:, 1:] != ordered[:, :-1]).all(1, keepdim=True)


def _completed(requested: Tensor, wanted: Tensor, expected: Tensor) -> Tensor:
    """Fills the ranks that are not requested with the expected indices that no requested rank uses, in their order."""
    open_rows = ((wanted == NONE).any(1) & (requested != expected).any(1)).nonzero().reshape(-1).tolist()
    indices = requested.clone()
    for row in open_rows:
        free = wanted[row] == NONE
        used = set(wanted[row][~free].tolist())
        unused = [index for index in expected[row].tolist() if index not in used]
        indices[row][free] = torch.tensor(unused[: int(free.sum())], dtype=indices.dtype, device=indices.device)
    return indices


def _listed(distance: Tensor, index: Tensor, rank: int) -> list[tuple[float, int, int, int]]:
    """Returns (distance, row, rank, index) of all distances up to the allowed one."""
    near = (distance <= 1).nonzero().tolist()
    return [(float(distance[row, at]), row, rank, int(index[row, at])) for row, at in near]
