"""Implements sort, topk and kthvalue by operations that have a Triton kernel in Inductor.  Equal elements keep their order, which
torch guarantees only for a stable sort.  NaN counts as the largest value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...errors import ModelError

SORTED, RANKED, SEARCHED = 512, 1 << 14, 16
"""The maximum lengths that Inductor sorts in one kernel, and that `sort` ranks by counting.  The maximum k that `topk` searches."""


def sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the sorted values and their indices; equal values keep their order.  The rank of an element is the number of elements
    before it.  The work grows with the square of the length, so the length is limited."""
    if x.dim() == 0 or x.shape[dim] <= SORTED:
        return NotImplemented
    length = x.shape[dim]
    if length > RANKED:
        raise ModelError("operator-without-kernel", f"sort of {length} elements: up to {RANKED} are lowered to Triton")
    rows = x.movedim(dim, -1)
    row, column = rows.unsqueeze(-1), rows.unsqueeze(-2)  # (..., length, 1) and (..., 1, length)
    before = _less(row, column) if descending else _less(column, row)
    position = torch.arange(length, device=x.device, dtype=torch.int32)  # Inductor scatters no int64
    same = ~_less(row, column) & ~_less(column, row)
    rank = (before | (same & (position < position.unsqueeze(-1)))).sum(-1)
    nowhere = torch.zeros(rank.shape, device=x.device, dtype=torch.int32)
    indices = nowhere.scatter(-1, rank, position.expand(rank.shape)).to(torch.int64)
    return rows.gather(-1, indices).movedim(-1, dim), indices.movedim(-1, dim)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest value and its index, the first one of equal values."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, indices = [part.narrow(dim, k - 1, 1) for part in torch.sort(x, dim=dim, stable=True)]
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest or smallest values, best first, and their indices, by k searches or a sort.  Equal values keep their order."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    rows = x.movedim(dim, -1)
    if k > SEARCHED:
        values, indices = _best_of_chunks(rows, k, largest)
        return values.movedim(-1, dim), indices.movedim(-1, dim)
    position = torch.arange(rows.shape[-1], device=x.device)
    remaining = torch.ones_like(rows, dtype=torch.bool)
    floating = x.is_floating_point()
    numbers = rows == rows  # NaN differs from itself
    limits = torch.finfo(x.dtype) if floating else torch.iinfo(x.dtype)
    worst = (-math.inf if floating else limits.min) if largest else (math.inf if floating else limits.max)
    values, indices = [], []
    for _ in range(k):
        remaining_nan = remaining & ~numbers if floating else None  # NaN counts as the largest
        candidates = torch.where(remaining & numbers, rows, worst)
        best = candidates.amax(-1, keepdim=True) if largest else candidates.amin(-1, keepdim=True)
        equal = remaining & (rows == best)
        if remaining_nan is not None:
            take_nan = remaining_nan.any(-1, keepdim=True) if largest else ~equal.any(-1, keepdim=True)
            equal = torch.where(take_nan, remaining_nan, equal)
        first = torch.where(equal, position, rows.shape[-1]).amin(-1, keepdim=True)
        values.append(rows.gather(-1, first))
        indices.append(first)
        remaining = remaining & (position != first)
    return torch.cat(values, -1).movedim(-1, dim), torch.cat(indices, -1).movedim(-1, dim)


def _best_of_chunks(rows: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k best of the last axis.  A long axis is replaced by the k best of each of its chunks, until it is short.  Equal values
    keep their order."""
    floating = rows.is_floating_point()
    limits = torch.finfo(rows.dtype) if floating else torch.iinfo(rows.dtype)
    worst = (-math.inf if floating else limits.min) if largest else (math.nan if floating else limits.max)
    chunk_size = max(SORTED, 1 << (4 * k - 1).bit_length())
    place: Tensor | None = None
    while rows.shape[-1] > chunk_size and chunk_size <= RANKED:
        count = -(-rows.shape[-1] // chunk_size)
        pad_shape = (*rows.shape[:-1], count * chunk_size - rows.shape[-1])
        chunks = torch.cat([rows, rows.new_full(pad_shape, worst)], -1).unflatten(-1, (count, chunk_size))
        values, indices = torch.sort(chunks, dim=-1, descending=largest, stable=True)
        start = torch.arange(count, device=rows.device).unsqueeze(-1) * chunk_size
        rows, positions = values[..., :k].flatten(-2), (indices[..., :k] + start).flatten(-2)
        place = positions if place is None else torch.cat([place, place.new_zeros(pad_shape)], -1).gather(-1, positions)
    values, indices = torch.sort(rows, dim=-1, descending=largest, stable=True)
    values, indices = values[..., :k], indices[..., :k]
    return values, indices if place is None else place.gather(-1, indices)


def _less(a: Tensor, b: Tensor) -> Tensor:
    return (a < b) | ((b != b) & (a == a)) if a.is_floating_point() else a < b  # NaN differs from itself
