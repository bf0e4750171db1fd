"""Replaces convolutions for which Inductor's templates fail or are slow: by matrix products, sums and simpler convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...transforms.few_rows.decompositions import PRODUCTS, kept

aten = torch.ops.aten

FEW = 8
"""A convolution of at most this many input channels is a matrix product over a copy of the input."""

ROW = 8
"""The maximum length of a sum that Inductor unrolls, and then can fuse, with the options in ../lower/inductor.py."""

BLOCKS, DEEP = 32, 2048
"""With fewer than BLOCKS blocks of 64 by 64, and an inner axis of DEEP elements or more, there is too little parallel work."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Replaces convolutions that Inductor's templates compute slowly or not at all.  The templates support two and three
    dimensions, without dilation.  x (batch, channels, *size), weight (out, in per group, *kernel), or (in, out per group, *kernel)
    if transposed."""
    axes = weight.dim() - 2
    stride, padding, dilation = _per_axis(stride, axes), _per_axis(padding, axes), _per_axis(dilation, axes)
    output_padding = _per_axis(output_padding, axes)
    if transposed:
        return _transposed(x, weight, bias, stride, padding, dilation, output_padding, groups)
    if weight.shape[1] == 1 and groups > 1 and math.prod(weight.shape[2:]) <= 64:
        return _add_bias(_depthwise(x, weight, stride, padding, dilation), bias)
    plain = all(step == 1 for step in dilation) and x.dtype in PRODUCTS
    if axes == 1 and plain:
        wide = aten.convolution(
            x.unsqueeze(2), weight.unsqueeze(2), bias, [1, *stride], [0, *padding], [1, 1], False, [0, 0], groups
        )
        return wide.squeeze(2)
    if plain and groups == 1 and axes == 2:
        underfilled = _underfilled(x, weight, stride, padding)
        if weight.shape[2:] == (1, 1) and stride == [1, 1] and not any(padding):
            return _add_bias(_pointwise(x, weight), bias) if underfilled else NotImplemented
        if math.prod(weight.shape[2:]) > 1 and (x.shape[1] <= FEW or underfilled):
            return _add_bias(_columns(x, weight, stride, padding), bias)
    return NotImplemented if plain else _add_bias(_unfolded(x, weight, stride, padding, dilation, groups), bias)


def _per_axis(values: Sequence[int], axes: int) -> list[int]:
    return list(values) * axes if len(values) == 1 else list(values)


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.view(-1, *[1] * (x.dim() - 2))


def _taps(x: Tensor, kernel: Sequence[int], stride: list[int], padding: list[int], dilation: list[int]) -> list[Tensor]:
    """Returns for every position of the kernel, row-major, the elements of x that it multiplies: (batch, channels, *output
    size)."""
    pad_widths = [width for pad in reversed(padding) for width in (pad, pad)]
    padded = F.pad(x, pad_widths) if any(padding) else x
    sizes = [(padded.shape[2 + axis] - dilation[axis] * (size - 1) - 1) // stride[axis] + 1 for axis, size in enumerate(kernel)]
    taps = []
    for flat in range(math.prod(kernel)):
        tap, remainder = padded, flat
        for axis in reversed(range(len(kernel))):
            remainder, position = divmod(remainder, kernel[axis])
            start = position * dilation[axis]
            tap = tap.narrow(2 + axis, start, (sizes[axis] - 1) * stride[axis] + 1)
            tap = aten.slice(tap, 2 + axis, 0, tap.shape[2 + axis], stride[axis])
        taps.append(tap)
    return taps


def _depthwise(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """One input channel per group: sums without matrix products.  At most `ROW` adjacent kernel positions are one sum, which
    Inductor unrolls.  One operation per position gave graphs of thousands of nodes.

    The operator `kept` (`transforms/few_rows`) writes the total to memory, so that one Triton kernel computes all sums.  Without
    it, Inductor fuses a reader of another shape only with the last additions, and launches a kernel per row."""
    wide = torch.float32 if x.dtype in PRODUCTS else x.dtype
    repeated = x.repeat_interleave(weight.shape[0] // x.shape[1], 1) if weight.shape[0] != x.shape[1] else x
    *kernel, width = weight.shape[2:]
    rows = weight.reshape(weight.shape[0], -1, width).to(wide)
    ones = [1] * (x.dim() - 2)
    sums = []
    for begin in range(0, width, ROW):
        count = min(ROW, width - begin)
        reach = (count - 1) * dilation[-1] + 1
        taps = _taps(repeated, [*kernel, 1], [*stride[:-1], 1], padding, dilation)
        for position, tap in enumerate(taps):
            last = tap.shape[-1] - (width - begin - count) * dilation[-1]
            windows = tap.narrow(-1, begin * dilation[-1], last - begin * dilation[-1]).unfold(-1, reach, stride[-1])
            windows = aten.slice(windows, -1, 0, reach, dilation[-1]).to(wide)
            sums.append((windows * rows[:, position, begin : begin + count].view(-1, *ones, count)).sum(-1))
    return kept(sum(sums[1:], sums[0]).to(x.dtype), _strides(x, sums[0].shape))


def _strides(x: Tensor, shape: Sequence[int]) -> list[int]:
    """The strides of a dense tensor of this shape whose axes have the memory order of x."""
    strides, step = [0] * x.dim(), 1
    for axis in sorted(range(x.dim()), key=lambda axis: (x.stride(axis), -axis)):
        strides[axis], step = step, step * shape[axis]
    return strides


def _pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """A kernel of one position as a matrix product, which `split_k` can split.  Inductor's conversion comes after `split_k`."""
    batch, channels, height, width = x.shape
    flat = x.permute(0, 2, 3, 1).reshape(-1, channels)
    return torch.mm(flat, weight.view(-1, channels).t()).view(batch, height, width, -1).permute(0, 3, 1, 2)


def _underfilled(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> bool:
    """Whether the template would have few blocks with many steps each.  A product is then faster, because it can be split.  On an
    H200 (tests/bench/gpu_kernels/kernel_times.py), 49 by 512 by 4608 took 24 us with the template and 7 us as a product.  196 by
    256 by 2304 took 16 and 14 us.  With more rows (56 and 100 blocks) the product was no faster."""
    sizes = [(x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride[i] + 1 for i in range(2)]
    blocks = math.ceil(x.shape[0] * math.prod(sizes) / 64) * math.ceil(weight.shape[0] / 64)
    return blocks < BLOCKS and math.prod(weight.shape[1:]) >= DEEP


def _columns(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """One matrix product.  A row of the first factor has all elements that one output position reads.  The template instead loops
    over the kernel's positions, with a block of channels each, which would be nearly empty for an image's three channels."""
    out, channels, height, width = weight.shape
    padded = F.pad(x, [padding[1], padding[1], padding[0], padding[0]]) if any(padding) else x
    windows = padded.unfold(2, height, stride[0]).unfold(3, width, stride[1])  # (b, c, oh, ow, kh, kw)
    batch, _, rows, columns = windows.shape[:4]
    inner = height * width * channels
    padding_elements = -inner % 32  # aligns rows to 64 bytes, without partial blocks of the inner axis
    flat = F.pad(windows.permute(0, 2, 3, 4, 5, 1).reshape(batch * rows * columns, inner), [0, padding_elements])
    factor = F.pad(weight.permute(0, 2, 3, 1).reshape(out, inner), [0, padding_elements])
    return torch.mm(flat, factor.t()).view(batch, rows, columns, out).permute(0, 3, 1, 2)


def _unfolded(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Tensor:
    """A matrix product per group, over a copy of x for every position of the kernel."""
    taps = _taps(x, weight.shape[2:], stride, padding, dilation)
    batch, channels, *sizes = taps[0].shape
    columns = torch.stack(taps, 2).view(batch, groups, channels // groups * len(taps), -1)  # (b, g, c k, p)
    columns = columns.permute(1, 2, 0, 3).reshape(groups, columns.shape[2], -1)
    rows = weight.reshape(groups, weight.shape[0] // groups, -1)
    out = torch.bmm(rows, columns).view(groups, rows.shape[1], batch, -1)
    return out.permute(2, 0, 1, 3).reshape(batch, weight.shape[0], *sizes)


def _transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """A convolution with the flipped kernel, over x with zeros inserted between its elements."""
    axes, kernel = len(stride), weight.shape[2:]
    for axis in range(axes):
        if stride[axis] > 1:
            spread = F.pad(x.unsqueeze(3 + axis), [0, 0] * (axes - 1 - axis) + [0, stride[axis] - 1])
            x = spread.flatten(2 + axis, 3 + axis).narrow(2 + axis, 0, (x.shape[2 + axis] - 1) * stride[axis] + 1)
    pad_widths = []
    for axis in reversed(range(axes)):
        margin = dilation[axis] * (kernel[axis] - 1) - padding[axis]
        pad_widths += [margin, margin + output_padding[axis]]
    flipped = weight.view(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)
    flipped = flipped.reshape(-1, weight.shape[0] // groups, *kernel).flip(list(range(2, 2 + axes)))
    zeros = [0] * axes
    return aten.convolution(F.pad(x, pad_widths), flipped, bias, [1] * axes, zeros, dilation, False, zeros, groups)
