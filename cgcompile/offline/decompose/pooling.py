"""Pools that Inductor leaves to PyTorch's own kernels, in terms of operations that it compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

WINDOW = 25
"""Elements of a window that Inductor averages itself, however windows lie (`_avg_poolnd` in torch/_inductor/lowering.py)."""


def averaged(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """`x` (..., d, h, w) averaged over windows that overlap where a length is no multiple of the size wanted."""
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
    """Large windows that overlap or leave gaps, of `x` (..., h, w) or (..., d, h, w), summed axis by axis: Inductor asks PyTorch's
    own kernel."""
    stride = stride or kernel
    if math.prod(kernel) <= WINDOW or list(kernel) == list(stride):
        return NotImplemented
    dtype, count = x.dtype, torch.ones((), dtype=torch.int64, device=x.device)
    x = x.to(torch.float32) if dtype in (torch.float16, torch.bfloat16) else x
    for axis, width in zip(range(-len(kernel), 0), kernel, strict=True):
        step, before = [(each * len(kernel))[axis] for each in (list(stride), list(padding))]
        length = x.shape[axis]
        rest = length + 2 * before - width
        number = (-(-rest // step) if ceil_mode else rest // step) + 1
        number -= (number - 1) * step >= length + before  # a window that would begin behind the padding
        begin = torch.arange(number, device=x.device) * step - before
        end = (begin + width).clamp(max=length + before)
        inside = end - begin if count_include_pad else end.clamp(max=length) - begin.clamp(min=0)
        count = count * inside.view([-1] + [1] * (-1 - axis))
        behind = max(0, (number - 1) * step + width - before - length)
        padded = aten.constant_pad_nd(x, [0, 0] * (-1 - axis) + [before, behind])
        x = padded.unfold(axis, width, step).sum(-1).narrow(axis, 0, number)
    return (x / (divisor or count)).to(dtype)


def largest(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The maxima of `x` (..., d, h, w) over such windows, and where each stands in d * h * w: the first of equal ones."""
    places = torch.arange(math.prod(x.shape[-3:]), device=x.device).view(x.shape[-3:]).expand(x.shape)
    for axis, size in zip((-1, -2, -3), reversed(sizes), strict=True):
        windows = _windows(x.shape[axis], size)
        found = [x.narrow(axis, *window).max(axis, keepdim=True) for window in windows]
        places = torch.cat(
            [places.narrow(axis, *window).gather(axis, one.indices) for window, one in zip(windows, found, strict=True)], axis
        )
        x = torch.cat([one.values for one in found], axis)
    return x, places


def _windows(length: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of each of `size` windows over an axis."""
    return [(index * length // size, -(-(index + 1) * length // size) - index * length // size) for index in range(size)]
