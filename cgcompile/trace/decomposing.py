"""Operations that have no Triton kernel in Inductor, in terms of those that have one.

Two tables: `REPLACED` by operation of the exported program (before torch takes it apart), and `decompositions()` by the smaller
operations that a program is retraced to.  Functions there return NotImplemented for what Inductor lowers well itself.

Private interfaces (torch 2.11, 2.13): `torch._inductor.decomposition.select_decomp_table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from torch._inductor.decomposition import select_decomp_table

from cgcompile.trace.attention import SHORTEST, WIDEST, attend, fits
from cgcompile.trace.errors import OperationNeedsGpu, RandomnessUnsupported
from cgcompile.trace.ordering import sort, topk

aten = torch.ops.aten

LONGEST = 512
"""Sequences up to here may have their whole matrix of attention scores in memory."""

FEW = 8
"""Input channels up to which a convolution is a product over a copy of the input."""

BLOCKS, DEEP = 128, 2048
"""A convolution with fewer blocks of 64 by 64 and an inner axis of at least so many elements has too little to run side by side."""

PRODUCTS = (torch.float16, torch.bfloat16, torch.float32)
"""Types of the factors that Inductor's templates of products and convolutions take."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for retracing: Inductor's own, and ours."""
    return {
        **select_decomp_table(),
        **get_decompositions(
            [aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default, aten.upsample_trilinear3d.default]
        ),
        aten.mm.default: product,
        aten.bmm.default: product,
        aten.addmm.default: added_product,
        aten.baddbmm.default: added_product,
        aten.convolution.default: convolution,
        aten._trilinear.default: trilinear,
        aten._cdist_forward.default: distances,
        aten.sort.default: lambda x, dim=-1, descending=False: sort(x, dim=dim, descending=descending),
        aten.sort.stable: sort,
        aten.topk.default: topk,
    }


# --- products -------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    """(..., m, k) by (..., k, n), both with the same leading axes.  A product with a vector reads its matrix once, so a sum does as
    well as a tensor core; types without a template become a sum too."""
    if a.dtype in PRODUCTS and min(a.shape[-2], b.shape[-1]) > 1 and a.shape[-1] > 0:
        return NotImplemented
    wide = torch.float32 if a.dtype in PRODUCTS else a.dtype
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2, dtype=wide).to(a.dtype)


def added_product(added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta * added + alpha * (a by b), with the sum of `product` where that takes a sum."""
    if a.dtype in PRODUCTS and min(a.shape[-2], b.shape[-1]) > 1 and a.shape[-1] > 0:
        return NotImplemented
    wide = torch.float32 if a.dtype in PRODUCTS else a.dtype
    scaled = alpha * (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2, dtype=wide)
    return (scaled if beta == 0 else beta * added.to(wide) + scaled).to(a.dtype)


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum over `sumdim` of three factors' product, each with axes of size 1 put in where its `expand` says."""
    for axes, position in ((expand1, 0), (expand2, 1), (expand3, 2)):
        for axis in sorted(axes):
            a, b, c = [x.unsqueeze(axis) if i == position else x for i, x in enumerate((a, b, c))]
    return (a * b * c).sum(list(sumdim)) if sumdim else a * b * c


def distances(a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """The p-norm of the difference of every row of a and every row of b: (..., n, d) by (..., m, d) -> (..., n, m)."""
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, dim=-1)


# --- convolutions ---------------------------------------------------------------------------------------------


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
    """Convolutions that Inductor's templates do not take: all but two- and three-dimensional ones without dilation.

    x (batch, channels, *size), weight (out, in of a group, *kernel), or (in, out of a group, *kernel) when transposed.
    """
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
    """For every position of the kernel, row-major: the elements of x that it meets, (batch, channels, *output size)."""
    around = [amount for pad in reversed(padding) for amount in (pad, pad)]
    padded = F.pad(x, around) if any(padding) else x
    sizes = [(padded.shape[2 + axis] - dilation[axis] * (size - 1) - 1) // stride[axis] + 1 for axis, size in enumerate(kernel)]
    taps = []
    for flat in range(math.prod(kernel)):
        tap, rest = padded, flat
        for axis in reversed(range(len(kernel))):
            rest, position = divmod(rest, kernel[axis])
            start = position * dilation[axis]
            tap = tap.narrow(2 + axis, start, (sizes[axis] - 1) * stride[axis] + 1)
            tap = aten.slice(tap, 2 + axis, 0, tap.shape[2 + axis], stride[axis])
        taps.append(tap)
    return taps


def _depthwise(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """One input channel per group: a sum over the kernel's positions, which becomes one kernel without products of matrices."""
    wide = torch.float32 if x.dtype in PRODUCTS else x.dtype
    repeated = x.repeat_interleave(weight.shape[0] // x.shape[1], 1) if weight.shape[0] != x.shape[1] else x
    flat = weight.reshape(weight.shape[0], -1).to(wide)
    one = [1] * (x.dim() - 2)
    taps = _taps(repeated, weight.shape[2:], stride, padding, dilation)
    total = taps[0].to(wide) * flat[:, 0].view(-1, *one)
    for position, tap in enumerate(taps[1:], 1):
        total = total + tap.to(wide) * flat[:, position].view(-1, *one)
    return total.to(x.dtype)


def _pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """A kernel of one position: a product of matrices over the channels, which may be cut into pieces.  Inductor makes a product of
    it, too, but too late for that."""
    batch, channels, height, width = x.shape
    flat = x.permute(0, 2, 3, 1).reshape(-1, channels)
    return torch.mm(flat, weight.view(-1, channels).t()).view(batch, height, width, -1).permute(0, 3, 1, 2)


def _underfilled(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> bool:
    """Whether the template would have few blocks with many steps each: then a copy of the input, whose product can be cut into
    pieces, is faster (H200: 26 us for 392 by 512 by 4608, 12 so)."""
    sizes = [(x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride[i] + 1 for i in range(2)]
    blocks = math.ceil(x.shape[0] * math.prod(sizes) / 64) * math.ceil(weight.shape[0] / 64)
    return blocks < BLOCKS and math.prod(weight.shape[1:]) >= DEEP


def _columns(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """One product of matrices, with a row of all that an output position meets.  The template walks the kernel's positions one by
    one with a block of channels each, which a picture's three channels leave nearly empty."""
    out, channels, height, width = weight.shape
    padded = F.pad(x, [padding[1], padding[1], padding[0], padding[0]]) if any(padding) else x
    met = padded.unfold(2, height, stride[0]).unfold(3, width, stride[1])  # (b, c, oh, ow, kh, kw)
    batch, _, rows, columns = met.shape[:4]
    inner = height * width * channels
    left = -inner % 32  # rows begin at multiples of 64 bytes, blocks of the inner axis are whole
    flat = F.pad(met.permute(0, 2, 3, 4, 5, 1).reshape(batch * rows * columns, inner), [0, left])
    factor = F.pad(weight.permute(0, 2, 3, 1).reshape(out, inner), [0, left])
    return torch.mm(flat, factor.t()).view(batch, rows, columns, out).permute(0, 3, 1, 2)


def _unfolded(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Tensor:
    """As a product of matrices per group, over a copy of x for every position of the kernel."""
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
    """A plain convolution of x with zeros between its elements, with the kernel turned round."""
    axes, kernel = len(stride), weight.shape[2:]
    for axis in range(axes):
        if stride[axis] > 1:
            spread = F.pad(x.unsqueeze(3 + axis), [0, 0] * (axes - 1 - axis) + [0, stride[axis] - 1])
            x = spread.flatten(2 + axis, 3 + axis).narrow(2 + axis, 0, (x.shape[2 + axis] - 1) * stride[axis] + 1)
    around = []
    for axis in reversed(range(axes)):
        margin = dilation[axis] * (kernel[axis] - 1) - padding[axis]
        around += [margin, margin + output_padding[axis]]
    turned = weight.view(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)
    turned = turned.reshape(-1, weight.shape[0] // groups, *kernel).flip(list(range(2, 2 + axes)))
    zeros = [0] * axes
    return aten.convolution(F.pad(x, around), turned, bias, [1] * axes, zeros, dilation, False, zeros, groups)


# --- attention ------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """(..., heads, rows, width) by (..., heads, columns, width): one kernel where it `fits`, else with float32 scores in memory."""
    if dropout_p > 0:
        raise RandomnessUnsupported(f"attention with dropout_p={dropout_p} draws random numbers")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if fits(query, key, value, attn_mask):
        return attend(query, key, value, attn_mask, is_causal, factor)
    rows, columns = query.shape[-2], key.shape[-2]
    if min(rows, columns) >= SHORTEST and max(rows, columns) > LONGEST:
        raise OperationNeedsGpu(
            f"scaled_dot_product_attention over {rows} by {columns} positions, {query.dtype}, heads {query.shape[-1]} wide: such "
            f"long sequences are lowered to Triton in half precision or float32, for heads up to {WIDEST} wide"
        )
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query, key.transpose(-2, -1)).to(torch.float32) * factor
    if is_causal:
        below = torch.arange(columns, device=query.device) <= torch.arange(rows, device=query.device).unsqueeze(-1)
        scores = torch.where(below, scores, -math.inf)
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.matmul(aten._safe_softmax(scores, -1).to(value.dtype), value)


# --- embedding bags -------------------------------------------------------------------------------------------


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bags of rows of `weight`, summed (mode 0), averaged (1) or their maximum (2): every bag looks at every index, in a fixed
    order, so that equal inputs give equal bits.  Of the four results only the first is of use without gradients."""
    starts = offsets[:-1] if include_last_offset else offsets
    ends = torch.cat([offsets[1:], offsets[-1:] if include_last_offset else offsets.new_full((1,), indices.shape[0])])
    ends = offsets[1:] if include_last_offset else ends
    position = torch.arange(indices.shape[0], device=indices.device)
    inside = (position >= starts.unsqueeze(-1)) & (position < ends.unsqueeze(-1)) & (indices != padding_idx)  # (bags, indices)
    rows = weight[indices].to(torch.float32)
    count = inside.sum(-1)
    if mode == 2:
        most = torch.where(inside.unsqueeze(-1), rows, -math.inf).amax(1)
        bags = torch.where(count.unsqueeze(-1) > 0, most, 0.0)
    else:
        rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(-1)
        bags = torch.where(inside.unsqueeze(-1), rows, 0.0).sum(1)
        bags = bags / count.clamp(min=1).unsqueeze(-1) if mode == 1 else bags
    return bags.to(weight.dtype), torch.zeros_like(indices), count, torch.zeros_like(offsets)


# --- operations as a whole -------------------------------------------------------------------------------------

REPLACED: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: attention,
    aten.embedding_bag.default: embedding_bag,
    aten.embedding_bag.padding_idx: embedding_bag,
    **get_decompositions(
        [
            *(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input),
            *(aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec),
        ]
    ),
}
"""Operations of exported programs that are replaced as a whole."""
