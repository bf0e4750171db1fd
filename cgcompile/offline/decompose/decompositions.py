"""Decompositions of operations without a Triton kernel in Inductor into operations that have one.  `REPLACED` maps operations of
the exported program, before torch decomposes them.  `decompositions()` maps the smaller operations of the retraced graph.  Its
functions return NotImplemented if Inductor lowers the case well itself.

To add one, look at the graph of torch.export.  Operations in this graph go to `REPLACED`, those that only torch's decompositions
create to `decompositions()`.  tests/cpu/offline/test_decompositions.py compares them with PyTorch's operators.  `cgcompile
operators --target sm_90` lists the operators without a kernel.

Only cross-compiled bundles use these tables.  A captured bundle keeps PyTorch's kernels for such operations, and the cpu target
calls functions (`targets/kernels/standalone.cpp`, else libtorch).  Both recorders use the decompositions for few rows:
`transforms/few_rows/decompositions.py`.

Private interfaces (torch 2.11, 2.13): `torch._inductor.decomposition.select_decomp_table`, `torch._decomp.get_decompositions`,
`generic_associative_scan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan
from torch._inductor.decomposition import select_decomp_table

from ...errors import ModelError
from ...transforms.few_rows.decompositions import added_product, argmax, product
from ..collectives import COLLECTIVES
from .attention import SHORTEST, WIDEST, attend, fits
from .convolutions import convolution
from .reductions import average_pool, averaged, largest, scatter_reduced
from .sort import kthvalue, sort, topk
from .triton_operators import launching

aten = torch.ops.aten

UNKNOWNS = 128
"""The maximum number of unknowns of a system of equations that is lowered.  Each unknown adds several kernels."""

SUMMED = 16
"""The solver multiplies matrices up to this size by elementwise products and sums, which Inductor can fuse."""

LONGEST = 512
"""The longest sequence whose attention scores may be stored in memory."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table for retracing: Inductor's table with additions."""
    return {
        **select_decomp_table(),
        **get_decompositions(
            [aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default, aten.upsample_trilinear3d.default]
        ),
        aten._adaptive_avg_pool3d.default: averaged,
        aten.avg_pool2d.default: average_pool,
        aten.avg_pool3d.default: average_pool,
        aten.adaptive_max_pool3d.default: largest,
        aten.rrelu_with_noise.default: leaky,
        aten.addbmm.default: lambda x, a, b, beta=1, alpha=1: x * beta + torch.bmm(a, b).sum(0) * alpha,
        aten.mm.default: product,
        aten.bmm.default: product,
        aten.addmm.default: added_product,
        aten._int_mm.default: integer_product,
        aten.argmax.default: argmax,
        aten.baddbmm.default: added_product,
        aten.convolution.default: convolution,
        aten._trilinear.default: trilinear,
        aten._cdist_forward.default: distances,
        aten.histc.default: histogram,
        aten.linalg_solve_triangular.default: solve_triangular,
        aten.scatter_reduce.two: scatter_reduced,
        aten._is_all_true.default: torch.all,
        aten._is_any_true.default: torch.any,
        aten.sort.default: lambda x, dim=-1, descending=False: sort(x, dim=dim, descending=descending),
        aten.sort.stable: sort,
        aten.topk.default: topk,
        aten.kthvalue.default: kthvalue,
    }


def normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch normalization of `x` (n, c, ...) with constant statistics: one product and one sum per element.  Scale and shift (c)
    depend only on weights.  They are folded, so that a kernel loads two vectors instead of four."""
    if training or mean is None or var is None:
        return NotImplemented
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    scale = torch.rsqrt(var.to(wide) + eps)
    if weight is not None:
        scale = scale * weight.to(wide)
    shift = -mean.to(wide) * scale
    if bias is not None:
        shift = shift + bias.to(wide)
    axes = [1, -1] + [1] * (x.dim() - 2)
    return (x.to(wide) * scale.view(axes) + shift.view(axes)).to(x.dtype)


def histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts the elements of `x` in each of `bins` equal intervals of [min, max], in x's dtype.  `max` is in the last interval."""
    if min >= max:  # the range is computed from the elements
        return NotImplemented
    wide = x.reshape(-1).to(torch.float64 if x.dtype in (torch.float64, torch.int64) else torch.float32)
    interval = ((wide - min) * bins / (max - min)).floor().clamp(max=bins - 1)
    in_range = (wide >= min) & (wide <= max)
    return ((interval[:, None] == torch.arange(bins, device=x.device)) & in_range[:, None]).sum(0).to(x.dtype)


# --- products -------------------------------------------------------------------------------------------------


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """(m, k) uint8 times (k, n) int8 -> (m, n) int32, with int8 factors, because the template needs equal dtypes.  The sums of b's
    columns usually depend only on weights, and are folded."""
    if a.dtype != torch.uint8:
        return NotImplemented
    return aten._int_mm((a.to(torch.int32) - 128).to(torch.int8), b) + 128 * b.to(torch.int32).sum(0)


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
    """The sum over `sumdim` of the product of three factors, after axes of size 1 are inserted at the positions in `expand1` to
    `expand3`."""
    for axes, position in ((expand1, 0), (expand2, 1), (expand3, 2)):
        for axis in sorted(axes):
            a, b, c = [x.unsqueeze(axis) if i == position else x for i, x in enumerate((a, b, c))]
    return (a * b * c).sum(list(sumdim)) if sumdim else a * b * c


def distances(a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """The p-norm of the difference of every row of a and every row of b: (..., n, d) by (..., m, d) -> (..., n, m)."""
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, dim=-1)


# --- systems of equations -------------------------------------------------------------------------------------


def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Solves `a @ x = b` for x, or `x @ a = b` if not `left`: (..., n, n) and (..., n, k) -> (..., n, k)."""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    if a.shape[-1] > UNKNOWNS:
        raise ModelError(
            "operator-without-kernel",
            f"linalg_solve_triangular with {a.shape[-1]} unknowns: up to {UNKNOWNS} are lowered to Triton",
        )
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return _solved(a, b.expand(*batch, *b.shape[-2:]), upper, unitriangular)


def _solved(a: Tensor, b: Tensor, upper: bool, unitriangular: bool) -> Tensor:
    """Solves one half of the unknowns, then the other; begins with the second half if `a` is upper triangular."""
    size = a.shape[-1]
    if size <= 1:
        return b if unitriangular or not size else b / a
    half = size // 2
    parts = (slice(0, half), slice(half, size))
    first_half, second_half = parts[::-1] if upper else parts
    first = _solved(a[..., first_half, first_half], b[..., first_half, :], upper, unitriangular)
    remainder = b[..., second_half, :] - _product(a[..., second_half, first_half], first)
    second = _solved(a[..., second_half, second_half], remainder, upper, unitriangular)
    return torch.cat([second, first] if upper else [first, second], -2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if max(a.shape[-2:]) > SUMMED:
        return a @ b
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


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
    """Queries (..., heads, rows, width), keys (..., heads, columns, width).  Uses one kernel if `fits` accepts the arguments, else
    stores float32 scores in memory."""
    if dropout_p > 0:
        raise ModelError("random-operation", f"attention with dropout_p={dropout_p} draws random numbers")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if fits(query, key, value, attn_mask):
        return attend(query, key, value, attn_mask, is_causal, factor)
    rows, columns = query.shape[-2], key.shape[-2]
    if min(rows, columns) >= SHORTEST and max(rows, columns) > LONGEST:
        raise ModelError(
            "operator-without-kernel",
            f"scaled_dot_product_attention over {rows} by {columns} positions, {query.dtype}, heads {query.shape[-1]} wide: such "
            f"long sequences are lowered to Triton in half precision or float32, for heads up to {WIDEST} wide",
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
    """The sum (mode 0), mean (1) or maximum (2) of bags of rows of `weight`.  Every bag reads all indices in a fixed order, so that
    equal inputs give equal bits.  Without gradients, a model uses only the first of the four results."""
    bounds = offsets if include_last_offset else torch.cat([offsets, offsets.new_full((1,), indices.shape[0])])
    starts, ends = bounds[:-1], bounds[1:]
    position = torch.arange(indices.shape[0], device=indices.device)
    inside = (position >= starts.unsqueeze(-1)) & (position < ends.unsqueeze(-1)) & (indices != padding_idx)  # (bags, indices)
    rows = weight[indices].to(torch.promote_types(weight.dtype, torch.float32))
    count = inside.sum(-1)
    if mode == 2:
        maxima = torch.where(inside.unsqueeze(-1), rows, -math.inf).amax(1)
        bags = torch.where(count.unsqueeze(-1) > 0, maxima, 0.0)
    else:
        rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(-1)
        bags = torch.where(inside.unsqueeze(-1), rows, 0.0).sum(1)
        bags = bags / count.clamp(min=1).unsqueeze(-1) if mode == 1 else bags
    return bags.to(weight.dtype), torch.zeros_like(indices), count, torch.zeros_like(offsets)


# --- cells and pools ------------------------------------------------------------------------------------------


def lstm_cell(
    x: Tensor, state: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The new hidden and cell states, (batch, hidden) each.  Replaces PyTorch's GPU kernel, which is not a Triton kernel."""
    hidden, cell = state
    gates = torch.nn.functional.linear(x, w_ih, b_ih) + torch.nn.functional.linear(hidden, w_hh, b_hh)
    input_gate, forget_gate, new, output_gate = gates.chunk(4, 1)
    cell = torch.sigmoid(forget_gate) * cell + torch.sigmoid(input_gate) * torch.tanh(new)
    return torch.sigmoid(output_gate) * torch.tanh(cell), cell


def gru_cell(
    x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """The new hidden states, (batch, hidden).  Replaces PyTorch's GPU kernel, which torch 2.11 cannot trace."""
    reset, update, new = torch.nn.functional.linear(x, w_ih, b_ih).chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = torch.nn.functional.linear(hidden, w_hh, b_hh).chunk(3, 1)
    new = torch.tanh(new + torch.sigmoid(reset + hidden_reset) * hidden_new)
    return (hidden - new) * torch.sigmoid(update + hidden_update) + new


def leaky(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """RReLU without random slopes: the slope is the mean of its bounds.  The default bounds are the operator's, because torch omits
    arguments that equal defaults."""
    return NotImplemented if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def grid_sample(x: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool) -> Tensor:
    """`torch.nn.functional.grid_sample` of images (n, c, h, w).  PyTorch would query cuDNN, which the build does not have."""
    if x.dim() != 4:
        return NotImplemented
    sampled: Tensor = _PLANES(x, grid, interpolation, padding, align_corners)
    return sampled


def frequencies(n: int, d: float = 1.0, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
    """`torch.fft.fftfreq`: (n,), with the negative frequencies at the end."""
    place = torch.arange(n, dtype=dtype or torch.get_default_dtype(), device=device)
    return torch.where(place < (n + 1) // 2, place, place - n) * (1.0 / (n * d))


def positive_frequencies(n: int, d: float = 1.0, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
    """`torch.fft.rfftfreq`: (n // 2 + 1,)."""
    return torch.arange(n // 2 + 1, dtype=dtype or torch.get_default_dtype(), device=device) * (1.0 / (n * d))


def window(share: float) -> Callable[..., Tensor]:
    """Returns `torch.hann_window` or `torch.hamming_window`: (length,).  `share` is the constant term."""

    def cosine_window(
        length: int, periodic: bool = True, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any
    ) -> Tensor:
        place = torch.arange(length, dtype=torch.float64, device=device)
        turn = 2 * math.pi / max(1, length if periodic else length - 1)
        values = share - (1 - share) * torch.cos(place * turn) if length > 1 else torch.ones_like(place)
        return values.to(dtype or torch.get_default_dtype())

    return cosine_window


# --- operations as a whole -------------------------------------------------------------------------------------


def associative_scan(combine: Callable[..., Any], xs: Sequence[Tensor], more: Sequence[Any] = ()) -> Any:
    """Combines slices as PyTorch does on the CPU, in log2(number of slices) rounds."""
    return generic_associative_scan(combine, xs, additional_inputs=tuple(more))


_PLANES = get_decompositions([aten.grid_sampler_2d])[aten.grid_sampler_2d.default]

REPLACED: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: attention,
    aten.batch_norm.default: normalized,
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.grid_sampler.default: grid_sample,
    aten.fft_fftfreq.default: frequencies,
    aten.hann_window.default: window(0.5),
    aten.hann_window.periodic: window(0.5),
    aten.hamming_window.default: window(0.54),
    aten.hamming_window.periodic: window(0.54),
    aten.fft_rfftfreq.default: positive_frequencies,
    aten.embedding_bag.default: embedding_bag,
    aten.embedding_bag.padding_idx: embedding_bag,
    associative_scan_op: associative_scan,
    **COLLECTIVES,
    **get_decompositions([aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]),
}
"""Operations of exported programs that are replaced before torch decomposes them."""


def replacement(target: Any) -> Callable[..., Any] | None:
    """The replacement of an exported program's operation, or None."""
    return REPLACED.get(target) or launching(target)
