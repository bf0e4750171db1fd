"""Sorting and the largest elements in terms of operations that have a Triton kernel in Inductor.  Of equal elements the first comes
first, which torch promises for a stable sort only.  NaN is the largest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...errors import ModelError

SORTED, RANKED, SEARCHED = 512, 1 << 14, 16
"""Largest numbers of elements: that Inductor sorts in one kernel, that are ranked by counting, that are looked for one by one."""


def sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sorted values and where they were, equal ones in their order.  Every element counts those that come before it: the work grows
    with the square of the length, so that there is a limit."""
    if x.dim() == 0 or x.shape[dim] <= SORTED:
        return NotImplemented
    length = x.shape[dim]
    if length > RANKED:
        raise ModelError("operator-without-kernel", f"sort of {length} elements: up to {RANKED} are lowered to Triton")
    rows = x.movedim(dim, -1)
    one, other = rows.unsqueeze(-1), rows.unsqueeze(-2)  # (..., length, 1) and (..., 1, length)
    before = _less(one, other) if descending else _less(other, one)
    position = torch.arange(length, device=x.device, dtype=torch.int32)  # Inductor scatters no int64
    same = ~_less(one, other) & ~_less(other, one)
    rank = (before | (same & (position < position.unsqueeze(-1)))).sum(-1)
    nowhere = torch.zeros(rank.shape, device=x.device, dtype=torch.int32)
    where = nowhere.scatter(-1, rank, position.expand(rank.shape)).to(torch.int64)
    return rows.gather(-1, where).movedim(-1, dim), where.movedim(-1, dim)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest or smallest, best first, the first of equal ones: by looking k times, or by sorting."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    if k > SEARCHED:
        values, where = torch.sort(x, dim=dim, descending=largest, stable=True)
        return values.narrow(dim, 0, k), where.narrow(dim, 0, k)
    rows = x.movedim(dim, -1)
    position = torch.arange(rows.shape[-1], device=x.device)
    left = torch.ones_like(rows, dtype=torch.bool)
    floating = x.is_floating_point()
    numbers = rows == rows  # NaN differs from itself
    limits = torch.finfo(x.dtype) if floating else torch.iinfo(x.dtype)
    worst = (-math.inf if floating else limits.min) if largest else (math.inf if floating else limits.max)
    values, where = [], []
    for _ in range(k):
        other = left & ~numbers if floating else None  # NaN counts as the largest
        offered = torch.where(left & numbers, rows, worst)
        best = offered.amax(-1, keepdim=True) if largest else offered.amin(-1, keepdim=True)
        equal = left & (rows == best)
        if other is not None:
            turn = other.any(-1, keepdim=True) if largest else ~equal.any(-1, keepdim=True)
            equal = torch.where(turn, other, equal)
        first = torch.where(equal, position, rows.shape[-1]).amin(-1, keepdim=True)
        values.append(rows.gather(-1, first))
        where.append(first)
        left = left & (position != first)
    return torch.cat(values, -1).movedim(-1, dim), torch.cat(where, -1).movedim(-1, dim)


def _less(a: Tensor, b: Tensor) -> Tensor:
    return (a < b) | ((b != b) & (a == a)) if a.is_floating_point() else a < b  # NaN differs from itself
