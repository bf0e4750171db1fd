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


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest, and where it is: of equal ones the first."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, where = [part.narrow(dim, k - 1, 1) for part in torch.sort(x, dim=dim, stable=True)]
    return (values, where) if keepdim else (values.squeeze(dim), where.squeeze(dim))


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest or smallest, best first, the first of equal ones: by looking k times, or by sorting."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    rows = x.movedim(dim, -1)
    if k > SEARCHED:
        values, where = _best_of_pieces(rows, k, largest)
        return values.movedim(-1, dim), where.movedim(-1, dim)
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


def _best_of_pieces(rows: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k best of the last axis.  While it is long, the k best of each of its pieces take its place; equal ones keep their
    order."""
    floating = rows.is_floating_point()
    limits = torch.finfo(rows.dtype) if floating else torch.iinfo(rows.dtype)
    worst = (-math.inf if floating else limits.min) if largest else (math.nan if floating else limits.max)
    piece = max(SORTED, 1 << (4 * k - 1).bit_length())
    place: Tensor | None = None
    while rows.shape[-1] > piece and piece <= RANKED:
        count = -(-rows.shape[-1] // piece)
        rest = (*rows.shape[:-1], count * piece - rows.shape[-1])
        pieces = torch.cat([rows, rows.new_full(rest, worst)], -1).unflatten(-1, (count, piece))
        values, where = torch.sort(pieces, dim=-1, descending=largest, stable=True)
        start = torch.arange(count, device=rows.device).unsqueeze(-1) * piece
        rows, positions = values[..., :k].flatten(-2), (where[..., :k] + start).flatten(-2)
        place = positions if place is None else torch.cat([place, place.new_zeros(rest)], -1).gather(-1, positions)
    values, where = torch.sort(rows, dim=-1, descending=largest, stable=True)
    values, where = values[..., :k], where[..., :k]
    return values, where if place is None else place.gather(-1, where)


def _less(a: Tensor, b: Tensor) -> Tensor:
    return (a < b) | ((b != b) & (a == a)) if a.is_floating_point() else a < b  # NaN differs from itself
