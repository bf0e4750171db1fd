"""Attention of several tokens of each lane to the pages of its cache: a Triton kernel for GPUs, PyTorch's operations elsewhere.

Flash attention: each program processes ROWS tokens of one lane and one head.  It reads only the pages that these tokens see,
regardless of the width of the block table.  It neither concatenates pages nor makes a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .decode import first_seen, together

ROWS, BLOCK, WARPS, STAGES = 64, 64, 4, 2
"""Queries of a Triton program, tokens that it reads at a time, and Triton's options."""

LOG2E = tl.constexpr(1.4426950408889634)


def paged_prefill(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, start: Tensor, count: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float,
) -> Tensor:  # fmt: skip
    """query (batch, seq, heads, dim), keys and values (pages, key heads, PAGE, dim), pages int64 (batch, blocks) -> the shape and
    dtype of `query`.

    Token i of a lane has position `start + i` and sees all tokens up to it.  If `window` is not 0, it sees the last `window` of
    them; if `chunk` is not 0, those since the last multiple of `chunk`.  `start` and `count` int64 (batch,).  Results after the
    first `count` tokens have no meaning.  `softcap` and `sinks` as in `paged_decode`.
    """
    use_triton = query.device.type == "cuda" and query.dtype != torch.float32  # float32 needs exact products
    function = paged_prefill_op if use_triton else with_pytorch
    return function(query, keys, values, pages, start, count, sinks, scale, window, chunk, softcap)


def with_pytorch(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, start: Tensor, count: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float,
) -> Tensor:  # fmt: skip
    """Computes `paged_prefill` with PyTorch's operations, on a copy of all pages of the block table."""
    batch, seq, heads, _ = query.shape
    groups = heads // keys.shape[1]
    key, value = [together(cache, pages) for cache in (keys, values)]  # (batch, key heads, tokens, dim)
    step = torch.arange(seq, device=query.device)
    place = (start[:, None] + torch.minimum(step, (count - 1).clamp(min=0)[:, None]))[:, :, None]
    token = torch.arange(key.shape[2], device=query.device)
    seen = token <= place
    if window:
        seen = seen & (token > place - window)
    if chunk:
        seen = seen & (token >= place - place % chunk)
    rows = query.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (batch, key heads, groups * seq, dim)
    mask = seen[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    if softcap or sinks is not None:
        products = rows.float() @ key.float().transpose(-2, -1) * scale
        if softcap:
            products = softcap * torch.tanh(products / softcap)
        products = products.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sink_scores = sinks.float().view(1, -1, groups, 1, 1).expand(batch, -1, -1, seq, -1).flatten(2, 3)
            products = torch.cat([products, sink_scores], -1)
        mixed = torch.softmax(products, -1)[..., : key.shape[2]].to(value.dtype) @ value
    else:
        mixed = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return mixed.unflatten(2, (groups, seq)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def with_triton(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, start: Tensor, count: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float,
) -> Tensor:  # fmt: skip
    """Computes `paged_prefill` with the Triton kernel."""
    query = query.contiguous()
    batch, seq, heads, dim = query.shape
    key_heads, page = keys.shape[1:3]
    output = torch.empty_like(query)
    wrap_triton(attend)[(triton.cdiv(seq, ROWS), heads, batch)](
        query, keys, values, pages, start, count, query if sinks is None else sinks, output, seq, pages.shape[1],
        SCALE=scale, WINDOW=window, CHUNK=chunk, SOFTCAP=softcap, SINKS=sinks is not None,
        HEADS=heads, GROUPS=heads // key_heads, DIM=dim,
        WIDTH=max(16, triton.next_power_of_2(dim)), PAGE=page, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return output


paged_prefill_op = triton_op("language_model::paged_prefill", with_triton, mutates_args=())
paged_prefill_op.register_kernel("cpu")(with_pytorch)  # cross-compiling runs the model on the CPU


@paged_prefill_op.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, start: Tensor, count: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float,
) -> Tensor:  # fmt: skip
    return query.new_empty(query.shape)


@triton.jit
def attend(
    query, keys, values, pages, start, count, sinks, output, seq, blocks,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Processes ROWS queries of one lane and one head.  Programs whose queries see the most tokens start first."""
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head, lane = tl.program_id(1), tl.program_id(2).to(tl.int64)
    before, most = tl.load(start + lane), tl.maximum(tl.load(count + lane) - 1, 0)
    row, column = block + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    place = before + tl.minimum(row, most)
    first = before + tl.minimum(block, most)
    end = tl.where(block <= most, before + tl.minimum(block + ROWS - 1, most) + 1, 0)
    begin = first_seen(first, WINDOW, CHUNK) // BLOCK * BLOCK if WINDOW or CHUNK else 0
    full = begin if WINDOW or CHUNK else tl.minimum(first + 1, end) // BLOCK * BLOCK  # every row sees all tokens before this one

    inside = column < DIM
    offsets = ((lane * seq + row) * HEADS + head)[:, None] * DIM + column[None]
    used = (row < seq)[:, None] & inside[None]
    q = tl.load(query + offsets, mask=used, other=0.0)
    top = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    base = head // GROUPS * PAGE
    stride = HEADS // GROUPS * PAGE
    table = pages + lane * blocks
    for at in range(begin, full, BLOCK):
        token = at + tl.arange(0, BLOCK)
        rows = (tl.load(table + token // PAGE) * stride + base + token % PAGE) * DIM
        k = tl.load(keys + rows[None] + column[:, None], mask=inside[:, None], other=0.0)
        v = tl.load(values + rows[:, None] + column[None], mask=inside[None], other=0.0)
        products = capped(tl.dot(q, k, input_precision="ieee"), SCALE, SOFTCAP)
        higher = tl.maximum(top, tl.max(products, 1))
        weights = tl.exp2(products - higher[:, None])
        shrink = tl.exp2(top - higher)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    for at in range(full, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        live = token < end
        rows = (tl.load(table + token // PAGE, mask=live, other=0) * stride + base + token % PAGE) * DIM
        k = tl.load(keys + rows[None] + column[:, None], mask=live[None] & inside[:, None], other=0.0)
        v = tl.load(values + rows[:, None] + column[None], mask=live[:, None] & inside[None], other=0.0)
        products = capped(tl.dot(q, k, input_precision="ieee"), SCALE, SOFTCAP)
        seen = token[None] <= place[:, None]
        if WINDOW or CHUNK:
            seen = seen & (token[None] >= first_seen(place, WINDOW, CHUNK)[:, None])
        products = tl.where(seen, products, float("-inf"))
        higher = tl.maximum(top, tl.max(products, 1))
        weights = tl.exp2(products - higher[:, None])
        shrink = tl.exp2(top - higher)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        mixed *= tl.exp2(top - higher)[:, None]
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
    mixed /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + offsets, mixed.to(output.dtype.element_ty), mask=used)


@triton.jit
def capped(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Returns scores multiplied by log2(e), because exp2 is used instead of exp."""
    if SOFTCAP != 0.0:
        return (SOFTCAP * LOG2E) * (1 - 2 / (1 + tl.exp(products * (2 * SCALE / SOFTCAP))))  # tanh
    else:
        return products * (SCALE * LOG2E)
