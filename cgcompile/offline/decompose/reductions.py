"""Replaces pools and scatters for which Inductor calls PyTorch's own kernels, by operations that it compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ModelError

aten = torch.ops.aten

COMPARED = 1 << 32
"""The maximum number of comparisons of a position with an index in a scatter.  This many comparisons take some milliseconds."""

WINDOW = 25
"""The maximum size of a window that Inductor averages itself (`_avg_poolnd` in torch/_inductor/lowering.py)."""


def averaged(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Averages `x` (..., d, h, w) over windows, which overlap if a length is no multiple of the output size."""
    for axis, size in zip((-3, -2, -1), sizes, strict=True):
        x = torch.stack([x.narrow(axis, *window).mean(axis) for window in _windows(x.shape[axis], size)], axis)
    return x


def average_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """Averages over large windows that overlap or leave gaps, one axis after the other: `x` (..., h, w) or (..., d, h, w)."""
    stride = stride or kernel
    if math.prod(kernel) <= WINDOW or list(kernel) == list(stride):
        return NotImplemented
    dtype, count = x.dtype, torch.ones((), dtype=torch.int64, device=x.device)
    x = x.to(torch.float32) if dtype in (torch.float16, torch.bfloat16) else x
    for axis, width in zip(range(-len(kernel), 0), kernel, strict=True):
        step, before = [(sizes * len(kernel))[axis] for sizes in (list(stride), list(padding))]
        length = x.shape[axis]
        rest = length + 2 * before - width
        number = (-(-rest // step) if ceil_mode else rest // step) + 1
        number -= (number - 1) * step >= length + before  # drops a window that would begin after the input and its first padding
        begin = torch.arange(number, device=x.device) * step - before
        end = (begin + width).clamp(max=length + before)
        inside = end - begin if count_include_pad else end.clamp(max=length) - begin.clamp(min=0)
        count = count * inside.view([-1] + [1] * (-1 - axis))
        after = max(0, (number - 1) * step + width - before - length)
        padded = aten.constant_pad_nd(x, [0, 0] * (-1 - axis) + [before, after])
        x = padded.unfold(axis, width, step).sum(-1).narrow(axis, 0, number)
    return (x / (divisor or count)).to(dtype)


def largest(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The maxima of `x` (..., d, h, w) over the windows of `averaged`, and the position of each first maximum in d * h * w."""
    places = torch.arange(math.prod(x.shape[-3:]), device=x.device).view(x.shape[-3:]).expand(x.shape)
    for axis, size in zip((-1, -2, -3), reversed(sizes), strict=True):
        windows = _windows(x.shape[axis], size)
        maxima = [x.narrow(axis, *window).max(axis, keepdim=True) for window in windows]
        places = torch.cat(
            [places.narrow(axis, *window).gather(axis, top.indices) for window, top in zip(windows, maxima, strict=True)], axis
        )
        x = torch.cat([top.values for top in maxima], axis)
    return x, places


def _windows(length: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of every one of the `size` windows over an axis."""
    return [(index * length // size, -(-(index + 1) * length // size) - index * length // size) for index in range(size)]


# --- scatters -------------------------------------------------------------------------------------------------


def scatter_reduced(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
    """Combines every position of `x` along `dim` with the elements of `src` whose `index` is the position, by prod, mean, amax or
    amin.
    Without `include_self`, positions that have such elements ignore `x`.  Inductor computes sums itself, with atomic operations.
    Here every position compares all indices in a fixed order, so that equal inputs give equal bits."""
    if reduce == "sum" or x.dtype == torch.bool:
        return NotImplemented
    if x.dim() == 0:
        return scatter_reduced(x[None], 0, index.reshape(-1), src.reshape(-1), reduce, include_self=include_self)[0]
    dim %= x.dim()
    if x.shape[dim] * index.numel() > COMPARED:
        raise ModelError(
            "operator-without-kernel",
            f"scatter_reduce by {reduce} of {index.numel()} elements to {x.shape[dim]} places: up to {COMPARED} comparisons are "
            "lowered to Triton",
        )
    part, source = x, src
    for axis, length in enumerate(index.shape):
        source = source.narrow(axis, 0, length)
        part = part if axis == dim else part.narrow(axis, 0, length)
    combined = _combined(part, dim, index, source, reduce, include_self)
    for axis in range(x.dim()):  # elements outside the shape of `index` stay unchanged
        slices = tuple([slice(None) if other <= axis or other == dim else slice(combined.shape[other]) for other in range(x.dim())])
        rest = x[slices].narrow(axis, combined.shape[axis], x.shape[axis] - combined.shape[axis])
        combined = torch.cat([combined, rest], axis) if rest.shape[axis] else combined
    return combined


def _combined(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool) -> Tensor:
    """`scatter_reduced` for `index` and `src` that have the shape of `x` except along `dim`."""
    places = torch.arange(x.shape[dim], device=x.device)
    matches = index.movedim(dim, -1).unsqueeze(-2) == places.unsqueeze(-1)  # (..., places, indices)
    target, source = x.movedim(dim, -1), src.movedim(dim, -1).unsqueeze(-2)
    floating = x.is_floating_point()
    if reduce in ("amax", "amin"):
        limits = (-math.inf, math.inf) if floating else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
        best = torch.amax if reduce == "amax" else torch.amin
        reduced = best(torch.where(matches, source, limits[reduce == "amin"]), -1)
        joined = (torch.maximum if reduce == "amax" else torch.minimum)(reduced, target)
    else:
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        target, source = target.to(wide), source.to(wide)
        if reduce == "prod":
            reduced = torch.where(matches, source, 1).prod(-1)
            joined = reduced * target
        else:
            total, count = torch.where(matches, source, 0).sum(-1), matches.sum(-1).to(wide)
            reduced, joined = [_quotient(a, b, floating) for a, b in ((total, count.clamp(min=1)), (total + target, count + 1))]
    new = joined if include_self else torch.where(matches.any(-1), reduced, target)
    return new.to(x.dtype).movedim(-1, dim)


def _quotient(total: Tensor, count: Tensor, floating: bool) -> Tensor:
    return total / count if floating else torch.div(total, count, rounding_mode="floor")
