"""Attention in one Triton kernel of cgcompile, which does not store the matrix of scores.  Inductor launches the kernel unchanged.

A program instance computes a block of rows of one head.  It loops over the columns with a running maximum and sum (FlashAttention,
arXiv 2205.14135, section 3.1).  It reads tensors with their strides, and the result's axes have the query's memory order, as in
torch, so nothing is copied.  Inductor (torch 2.11, 2.13) passes tensors with the strides that were traced.  `launches` checks this
by the constants TENSOR_stride_AXIS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

SHORTEST = 16
"""The kernel is used if there are at least this many rows or columns.  With fewer, most of a block would be padding."""

WIDEST = 256
"""The maximum width of a head.  The sums of wider heads do not fit into registers."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

NO_MASK, KEEP, ADD = 0, 1, 2
"""The kernel's MASK: none; bool, True for columns that count; numbers that are added to the scores."""

SLICE = 32 << 10
"""The limit for (bytes of keys that a block loads at a time) * (bytes of an element), because float32 needs more registers."""

FEW_COLUMNS = 512
"""With at most this many columns, the kernel is used even if it has few program instances: it is as fast as Inductor's separate
kernels, which use all multiprocessors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The size of a block, the warps of a program instance, and the pipeline stages of the loop over the columns."""

    rows: int
    columns: int
    warps: int
    stages: int


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` supports these arguments of scaled_dot_product_attention and is faster than separate kernels."""
    if query.dtype not in DTYPES or min(query.dim(), key.dim(), value.dim()) < 2:
        return False
    if mask is not None and mask.dtype not in (torch.bool, *DTYPES):
        return False
    rank = query.dim()
    if (key.dim(), value.dim()) != (rank, rank) or (mask is not None and mask.dim() > rank):
        return False  # the result would have more axes than the query
    heads, key_heads, value_heads = [1 if rank < 3 else tensor.shape[-3] for tensor in (query, key, value)]
    if (heads % max(key_heads, value_heads) and heads > 1) or (key_heads != value_heads and min(key_heads, value_heads) > 1):
        return False
    rows, columns, width, depth = query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1]
    if 0 in (query.numel(), columns, depth) or max(width, depth) > WIDEST or max(rows, columns) < SHORTEST:
        return False
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return rows >= SHORTEST or columns <= FEW_COLUMNS or 2 * math.prod(query.shape[:-2]) >= processors


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Computes softmax(query @ key^T * scale + mask) @ value inside `fake_device`, for arguments that `fits` accepts.

    query (..., heads, rows, width), key (..., groups, columns, width), value (..., groups, columns, depth).  mask broadcast to
    (..., heads, rows, columns): bool (True: the column counts), or a float that is added.  `heads` is a multiple of `groups`;
    leading axes are broadcast.  A row in which no column counts becomes zeros, as in torch.  Returns (..., heads, rows, depth) of
    the query's dtype.
    """
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v, m = [None if tensor is None else _with_four_axes(tensor, lead) for tensor in (query, key, value, mask)]
    assert q is not None and k is not None and v is not None
    rows, columns, width, depth = query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1]
    batch, heads, groups = math.prod(lead), max(q.shape[1], k.shape[1], v.shape[1]), max(k.shape[1], v.shape[1])
    order = sorted(range(4), key=lambda axis: (-q.stride(axis), axis)) if depth == width else [0, 1, 2, 3]
    sizes = (batch, heads, rows, depth)
    out = torch.empty([sizes[axis] for axis in order], dtype=query.dtype, device=query.device)
    result = out.permute([order.index(axis) for axis in range(4)])
    properties = torch.cuda.get_device_properties(query.device)
    blocks = choose_blocks(
        (batch * heads, rows, columns, width, depth),
        query.dtype.itemsize,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )
    named = {
        "query": _without_repetition(q),
        "key": _without_repetition(k),
        "value": _without_repetition(v),
        "mask": None if m is None else _without_repetition(m),
    }
    wrap_triton(fused_attention)[(batch * heads * _ceil_divide(rows, blocks.rows),)](
        **named,
        out=out,
        **{f"{name}_stride_{axis}": _stride(tensor, axis) for name, tensor in named.items() for axis in range(4)},
        **{f"OUT_{axis}": result.stride(axis) for axis in range(4)},
        HEADS=heads,
        GROUP=heads // groups,
        ROWS=rows,
        COLUMNS=columns,
        WIDTH=width,
        DEPTH=depth,
        SCALE=float(scale),
        CAUSAL=bool(is_causal),
        MASK=NO_MASK if mask is None else KEEP if mask.dtype == torch.bool else ADD,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.columns,
        BLOCK_K=_block_size(width),
        BLOCK_V=_block_size(depth),
        ALLOW_TF32=False,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    if len(lead) > 1:
        return result.unflatten(0, lead)
    return result[(0,) * (4 - query.dim())]


def choose_blocks(problem: Sequence[int], item: int, processors: int, shared: int) -> Blocks:
    """Chooses blocks for (heads of all batches, rows, columns, width, depth) and elements of `item` bytes.

    `shared`: bytes of shared memory of a block.  Larger blocks read keys and values less often.  Smaller blocks use all
    multiprocessors, which matters more.  With these limits, half-precision kernels spill no registers on any target, and float32
    kernels at most 384 bytes per thread (at width 128; triton 3.7).
    """
    heads, rows, columns, width, depth = problem
    wide = max(_block_size(width), _block_size(depth))
    length = min(_block_size(columns), 64, max(16, SLICE // (item * item * wide)))
    most = 16 if item * wide > 512 else 64 if item * wide > 256 or item > 2 else 128
    heights = [
        size for size in (128, 64, 32) if size <= min(most, _block_size(rows)) and heads * _ceil_divide(rows, size) >= processors
    ]
    deep = min(3, _ceil_divide(columns, length))  # with one iteration, loads cannot overlap
    for height in [*heights, 16]:
        warps = 8 if height == 128 or (height > 16 and height * wide * item * item > 1 << 15) else 4
        for stages in range(deep, min(deep, 2) - 1, -1):
            if _shared_bytes(height, length, width, depth, item, stages) <= shared:
                return Blocks(rows=height, columns=length, warps=warps, stages=stages)
    return Blocks(rows=16, columns=length, warps=4, stages=1)


def _shared_bytes(height: int, length: int, width: int, depth: int, item: int, stages: int) -> int:
    """An upper bound of a block's shared memory in bytes: queries, weights, and the keys, values and mask of every stage.  float32
    needs one more stage, because each factor is split into several tf32 factors."""
    stage = length * (_block_size(width) + _block_size(depth)) + height * length
    return item * (height * (_block_size(width) + length) + (stages + (item == 4)) * stage)


def _with_four_axes(tensor: Tensor, lead: Sequence[int]) -> Tensor:
    """Returns the tensor with four axes: adds leading axes of size 1, and merges several leading axes into one."""
    while tensor.dim() < max(4, 3 + len(lead)):
        tensor = tensor.unsqueeze(0)
    return tensor if tensor.dim() == 4 else tensor.expand(*lead, -1, -1, -1).flatten(0, -4)


def _without_repetition(tensor: Tensor) -> Tensor:
    """Reduces axes of stride 0 to size 1."""
    for axis in range(4):
        if tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _stride(tensor: Tensor | None, axis: int) -> int:
    """The stride in elements; 0 if every index reads the same element."""
    return 0 if tensor is None or tensor.shape[axis] == 1 else tensor.stride(axis)


def _ceil_divide(length: int, size: int) -> int:
    return -(-length // size)


def _block_size(size: int) -> int:
    """The smallest block for `size` elements: a power of 2, and at least 16, the minimum of tl.dot."""
    return max(16, 1 << (size - 1).bit_length())


# Like `attend`, with four axes.  One program instance per block of BLOCK_M rows of a head.  MASK: 0 none, 1 KEEP, 2 ADD.  Strides
# and OUT (the result's strides) are in elements; 0 reads the same element for every index.  `allow_tf32=ALLOW_TF32` is written as
# in Inductor's templates: `variants.exact_products` replaces it by the precision of float32 products.
@triton.jit
def fused_attention(
    query, key, value, mask, out,
    query_stride_0: tl.constexpr, query_stride_1: tl.constexpr, query_stride_2: tl.constexpr, query_stride_3: tl.constexpr,
    key_stride_0: tl.constexpr, key_stride_1: tl.constexpr, key_stride_2: tl.constexpr, key_stride_3: tl.constexpr,
    value_stride_0: tl.constexpr, value_stride_1: tl.constexpr, value_stride_2: tl.constexpr, value_stride_3: tl.constexpr,
    mask_stride_0: tl.constexpr, mask_stride_1: tl.constexpr, mask_stride_2: tl.constexpr, mask_stride_3: tl.constexpr,
    OUT_0: tl.constexpr, OUT_1: tl.constexpr, OUT_2: tl.constexpr, OUT_3: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALLOW_TF32: tl.constexpr,
):  # fmt: skip
    # an added mask is not multiplied by log2(e), because its lowest number would become minus infinity
    unit: tl.constexpr = 1.4426950408889634 if MASK == 2 else 1.0
    factor: tl.constexpr = SCALE if MASK == 2 else SCALE * 1.4426950408889634
    heads = tl.num_programs(0) // ((ROWS + BLOCK_M - 1) // BLOCK_M)
    # begins with the last rows, which take longest under a causal mask
    first = ((ROWS + BLOCK_M - 1) // BLOCK_M - 1 - tl.program_id(0) // heads) * BLOCK_M
    which = tl.program_id(0) % heads
    batch = (which // HEADS).to(tl.int64)
    head = (which % HEADS).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    wide = tl.arange(0, BLOCK_K)
    deep = tl.arange(0, BLOCK_V)
    inside = first + row < ROWS
    start = query + batch * query_stride_0 + head * query_stride_1 + first.to(tl.int64) * query_stride_2
    start = start + row[:, None] * query_stride_2 + wide[None, :] * query_stride_3
    q = tl.load(start, inside[:, None] & (wide < WIDTH)[None, :], 0.0)
    keys = key + batch * key_stride_0 + head // GROUP * key_stride_1
    keys = keys + column[None, :] * key_stride_2 + wide[:, None] * key_stride_3
    values = value + batch * value_stride_0 + head // GROUP * value_stride_1
    values = values + column[:, None] * value_stride_2 + deep[None, :] * value_stride_3
    if MASK > 0:
        masks = mask + batch * mask_stride_0 + head * mask_stride_1 + first.to(tl.int64) * mask_stride_2
        masks = masks + row[:, None] * mask_stride_2 + column[None, :] * mask_stride_3
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    end = COLUMNS
    if CAUSAL:
        end = tl.minimum(first + BLOCK_M, COLUMNS)
    for passed in range(0, end, BLOCK_N):
        left = passed + column < COLUMNS
        k = tl.load(keys, (wide < WIDTH)[:, None] & left[None, :], 0.0)
        scores = tl.dot(q, k, allow_tf32=ALLOW_TF32) * factor
        counts = left[None, :]
        if CAUSAL:
            counts = counts & ((passed + column)[None, :] <= (first + row)[:, None])
        if MASK == 1:
            counts = counts & (tl.load(masks, inside[:, None] & left[None, :], 0) != 0)
        if MASK == 2:
            scores = scores + tl.load(masks, inside[:, None] & left[None, :], 0.0).to(tl.float32)
        scores = tl.where(counts, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        weights = tl.exp2((scores - level[:, None]) * unit)
        decay = tl.exp2((best - level) * unit)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(values, left[:, None] & (deep < DEPTH)[None, :], 0.0)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * decay[:, None], allow_tf32=ALLOW_TF32)
        best = higher
        keys += BLOCK_N * key_stride_2
        values += BLOCK_N * value_stride_2
        if MASK > 0:
            masks += BLOCK_N * mask_stride_3
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros where no column counts
    target = out + batch * OUT_0 + head * OUT_1 + first.to(tl.int64) * OUT_2
    target = target + row[:, None] * OUT_2 + deep[None, :] * OUT_3
    tl.store(target, mixed.to(out.dtype.element_ty), inside[:, None] & (deep < DEPTH)[None, :])
