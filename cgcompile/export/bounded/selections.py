"""Operators that select elements by data.  Their padded results are large enough for any selection.  Selected elements come first,
in PyTorch's order.  Indices in the padding are 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Selected(NamedTuple):
    """The padded positions of a selection (int64, one tensor per axis of the source), and the number of valid ones."""

    positions: tuple[Tensor, ...]
    count: Tensor


def selected(mask: Tensor) -> Selected:
    """Returns the positions where a mask is true, in row-major order as `torch.nonzero(mask, as_tuple=True)`."""
    flat = mask.reshape(-1)
    size = flat.shape[0]
    running = flat.to(torch.int64).cumsum(0)
    slots = torch.where(flat, running - 1, size)
    order = torch.arange(size, device=mask.device)
    places = torch.zeros(size + 1, dtype=torch.int64, device=mask.device).index_put((slots,), order)[:size]
    positions = []
    for length in reversed(mask.shape[1:]):
        positions.append(places % length)
        places = places // length
    return Selected((places, *reversed(positions)), flat.to(torch.int64).sum())


class Unique(NamedTuple):
    """The padded results of `torch.unique`: values, index of every element among them, counts; and the number of values."""

    values: Tensor
    inverse: Tensor
    counts: Tensor
    count: Tensor


def unique(x: Tensor, valid: Tensor | None, *, ordered: bool) -> Unique:
    """Returns the distinct elements of a tensor, ascending; without `ordered` one element per run (unique_consecutive).  `valid`:
    mask of valid elements, of the shape of `x`; without `ordered` they must come first."""
    flat = x.reshape(-1)
    size = flat.shape[0]
    counts = torch.ones(size, dtype=torch.bool, device=x.device) if valid is None else valid.reshape(-1)
    order = torch.arange(size, device=x.device)
    if ordered:
        flat, order = torch.sort(flat.to(torch.uint8) if x.dtype is torch.bool else flat, stable=True)
        if valid is not None:
            counts = counts.index_select(0, order)
            front = torch.sort((~counts).to(torch.uint8), stable=True)[1]
            flat, order, counts = flat.index_select(0, front), order.index_select(0, front), counts.index_select(0, front)
    first = torch.ones(1, dtype=torch.bool, device=x.device)
    begins = torch.cat([first, flat[1:] != flat[:-1]]) & counts
    (places,), count = selected(begins)
    group = begins.to(torch.int64).cumsum(0) - 1
    total = counts.to(torch.int64).sum()
    next_places = torch.cat([places[1:], places[:1]])
    ends = torch.where(torch.arange(size, device=x.device) + 1 < count, next_places, total)
    return Unique(
        values=flat.index_select(0, places).to(x.dtype),
        inverse=torch.zeros_like(group).index_put((order,), group).reshape(x.shape),
        counts=ends - places,
        count=count,
    )


def sort(x: Tensor, valid: Tensor | None, axis: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Returns values and positions of a stable sort.  Padding comes last."""
    values, order = torch.sort(x, stable=True, dim=axis, descending=descending)
    if valid is None:
        return values, order
    counts = valid.expand(x.shape).gather(axis, order)
    front = torch.sort((~counts).to(torch.uint8), stable=True, dim=axis)[1]
    return values.gather(axis, front), order.gather(axis, front)


def kept_boxes(boxes: Tensor, scores: Tensor, threshold: float, valid: Tensor | None) -> Selected:
    """Non-maximum suppression as in torchvision: boxes [n, 4] (x1, y1, x2, y2), scores [n].  Returns positions by descending score.

    A box is kept unless it overlaps a kept box with a higher score.  This condition over all boxes has one solution.  The loop
    evaluates it until nothing changes, at most n times.
    """
    _, order = sort(scores, valid, 0, True)
    x1, y1, x2, y2 = boxes.index_select(0, order).unbind(1)
    areas = (x2 - x1) * (y2 - y1)
    size = order.shape[0]
    wide = torch.minimum(x2[:, None], x2[None]) - torch.maximum(x1[:, None], x1[None])
    high = torch.minimum(y2[:, None], y2[None]) - torch.maximum(y1[:, None], y1[None])
    shared = wide.clamp(min=0) * high.clamp(min=0)
    ranks = torch.arange(size, device=order.device)
    overlaps = (shared / (areas[:, None] + areas[None] - shared) > threshold) & (ranks[:, None] < ranks[None])
    real = torch.ones(size, dtype=torch.bool, device=order.device) if valid is None else ranks < valid.to(torch.int64).sum()

    def changes(kept: Tensor, before: Tensor, overlaps: Tensor, real: Tensor) -> Tensor:
        return (kept != before).any()

    def turn(kept: Tensor, before: Tensor, overlaps: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return real & ~(overlaps & kept[:, None]).any(0), kept.clone()

    kept, _ = torch.ops.higher_order.while_loop(changes, turn, (real.clone(), ~real), (overlaps, real))
    (places,), count = selected(kept)
    return Selected((order.index_select(0, places),), count)
