"""Attention of one token of each lane to the pages of its cache: Triton kernels for GPUs, PyTorch's operations elsewhere.

Flash decoding: several Triton programs process the tokens of a lane and a key head in blocks.  They read each block once for all
query heads of this key head.  A second kernel combines their partial results.  The number of programs depends only on recorded
sizes.  It is chosen so that a single lane also uses the whole GPU.  Programs without a block write nothing, and the second kernel
skips them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK, WARPS, STAGES = 32, 4, 3
"""Tokens that a program reads at a time, and Triton's options: the fastest of 24 settings on an H100 (1 to 32 lanes, 1k to 16k
tokens)."""

PROGRAMS = 264
"""Target number of programs: 2 for each of the 132 multiprocessors of an H100 or H200."""

PARTS = 64
"""Maximum number of programs that share the tokens of a lane and a key head."""


def paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, place: Tensor, length: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float, on_gpu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query (batch, heads, dim), keys and values (pages, key heads, PAGE, dim), pages int64 (batch, blocks) -> the result of
    attention, float32 (batch, heads, dim), and the logarithm of the sum of the weights, float32 (batch, heads); zeros and -inf if
    no token is visible.

    Tokens before `length` (batch,) are visible, up to the query's position `place` (batch,): the last `window` of them (0: all),
    and those since the last multiple of `chunk` (0: all).  `softcap`: the limit of scores, 0.0 for none; `sinks`: (heads,), as in
    `attention.Scores`; `on_gpu`: whether to use the Triton kernels.
    """
    function = paged_decode_op if on_gpu else with_pytorch
    return function(query, keys, values, pages, place, length, sinks, scale, window, chunk, softcap)


def with_pytorch(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, place: Tensor, length: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `paged_decode` with PyTorch's operations, over all pages of the block table."""
    key, value = [together(cache, pages) for cache in (keys, values)]
    token = torch.arange(key.shape[2], device=query.device)
    seen = (token < length[:, None]) & (token <= place[:, None])
    if window:
        seen = seen & (token > place[:, None] - window)
    if chunk:
        seen = seen & (token >= (place - place % chunk)[:, None])
    return partials(query, key, value, seen, sinks, scale, softcap)


def together(cache: Tensor, pages: Tensor) -> Tensor:
    """(pages, key heads, PAGE, dim) -> the pages of each lane concatenated, (batch, key heads, blocks * PAGE, dim)."""
    return cache[pages].transpose(1, 2).flatten(2, 3)


def partials(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention of a token (batch, heads, dim) to key and value (batch, key heads, tokens, dim) where `seen`, bool (batch, tokens),
    is true.  Returns the same two tensors as `paged_decode`."""
    # Keep the heads in two axes: a combined axis has a stride that torch 2.11 treats as a condition on the number of tokens.
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    rows = query.unflatten(1, heads).float()  # (batch, *heads, dim)
    products = rows @ key.float().transpose(-2, -1) * scale
    if softcap:
        products = softcap * torch.tanh(products / softcap)
    products = products.masked_fill(~seen[:, None, None], float("-inf"))  # (batch, *heads, tokens)
    top = products.amax(-1)
    if sinks is not None:
        top = torch.maximum(top, sinks.float().unflatten(0, heads))
    top = top.clamp(min=torch.finfo(torch.float32).min)  # it is -inf if no token is visible, and -inf - -inf is NaN
    weights = (products - top[..., None]).exp()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (sinks.float().unflatten(0, heads) - top).exp()
    mixed = weights @ value.float() / torch.where(total > 0, total, 1.0)[..., None]
    return mixed.flatten(1, 2), (total.log() + top).flatten(1, 2)


def with_triton(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, place: Tensor, length: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `paged_decode` with two Triton kernels."""
    query = query.contiguous()
    batch, heads, dim = query.shape
    key_heads, page = keys.shape[1:3]
    blocks = triton.cdiv(pages.shape[1] * page, BLOCK)
    parts = triton.next_power_of_2(max(1, min(PARTS, blocks, triton.cdiv(PROGRAMS, batch * key_heads))))
    sums = query.new_empty((batch, heads, parts, dim), dtype=torch.float32)
    tops = query.new_empty((batch, heads, parts, 2), dtype=torch.float32)
    mixed = query.new_empty((batch, heads, dim), dtype=torch.float32)
    total = query.new_empty((batch, heads), dtype=torch.float32)
    width = max(16, triton.next_power_of_2(dim))  # tl.dot needs at least 16
    groups = heads // key_heads
    wrap_triton(read_part)[(parts, key_heads, batch)](
        query, keys, values, pages, place, length, sums, tops, pages.shape[1], parts,
        SCALE=scale, WINDOW=window, CHUNK=chunk, SOFTCAP=softcap, GROUPS=groups,
        ROWS=max(16, triton.next_power_of_2(groups)), DIM=dim,
        WIDTH=width, PAGE=page, KEY_HEADS=key_heads, BLOCK=BLOCK, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    wrap_triton(add_parts)[(batch, heads)](
        sums, tops, query if sinks is None else sinks, place, length, mixed, total,
        SINKS=sinks is not None, WINDOW=window, CHUNK=chunk, DIM=dim, WIDTH=width,
        HEADS=heads, PARTS=parts, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return mixed, total


paged_decode_op = triton_op("language_model::paged_decode", with_triton, mutates_args=())
paged_decode_op.register_kernel("cpu")(with_pytorch)  # cross-compiling runs the model on the CPU


@paged_decode_op.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, place: Tensor, length: Tensor, sinks: Tensor | None,
    scale: float, window: int, chunk: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape, dtype=torch.float32), query.new_empty(query.shape[:2], dtype=torch.float32)


@triton.jit
def read_part(
    query, keys, values, pages, place, length, sums, tops, blocks, parts,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, KEY_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Processes every `parts`-th block of one lane's tokens, for the GROUPS query heads of one key head."""
    part, head, lane = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    position = tl.load(place + lane)
    end = tl.minimum(tl.load(length + lane), position + 1)
    # Begin at a multiple of BLOCK, and mask earlier tokens.  Without WINDOW and CHUNK the first pages do not depend on `position`,
    # so that they are loaded without waiting for it.
    begin = first_seen(position, WINDOW, CHUNK) // BLOCK * BLOCK if WINDOW or CHUNK else 0
    first = begin + part * BLOCK
    step = tl.arange(0, BLOCK)
    table = pages + lane * blocks
    page = tl.load(table + (first + step) // PAGE, mask=first + step < blocks * PAGE, other=0)

    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = column < DIM
    heads = head * GROUPS + row
    offsets = (lane * KEY_HEADS * GROUPS + heads)[:, None] * DIM + column[None]
    q = tl.load(query + offsets, mask=(row < GROUPS)[:, None] & inside[None], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(first, end, parts * BLOCK):
        token = at + step
        live = token < end
        rows = ((page * KEY_HEADS + head) * PAGE + token % PAGE) * DIM
        k = tl.load(keys + rows[None] + column[:, None], mask=live[None] & inside[:, None], other=0.0)
        v = tl.load(values + rows[:, None] + column[None], mask=live[:, None] & inside[None], other=0.0)
        later = token + parts * BLOCK
        page = tl.load(table + later // PAGE, mask=later < end, other=0)
        products = tl.dot(q, k, input_precision="ieee") * SCALE
        if SOFTCAP != 0.0:
            products = SOFTCAP * (1 - 2 / (1 + tl.exp(2 * products / SOFTCAP)))  # tanh
        seen = live & (token >= first_seen(position, WINDOW, CHUNK)) if WINDOW or CHUNK else live
        products = tl.where(seen[None], products, float("-inf"))
        higher = tl.maximum(tl.maximum(top, tl.max(products, 1)), -3.0e38)  # it is -inf if no token is visible
        weights = tl.exp(products - higher[:, None])
        shrink = tl.exp(top - higher)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    out = (lane * KEY_HEADS * GROUPS + heads) * parts + part
    some = (row < GROUPS) & (first < end)
    tl.store(sums + out[:, None] * DIM + column[None], mixed, mask=some[:, None] & inside[None])
    tl.store(tops + out * 2, top, mask=some)
    tl.store(tops + out * 2 + 1, total, mask=some)


@triton.jit
def add_parts(
    sums, tops, sinks, place, length, mixed, total,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Combines the non-empty parts of one lane and one head."""
    lane, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(place + lane)
    end = tl.minimum(tl.load(length + lane), position + 1)
    begin = first_seen(position, WINDOW, CHUNK) // BLOCK * BLOCK if WINDOW or CHUNK else 0
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    some = begin + part * BLOCK < end
    base = (lane * HEADS + head) * PARTS + part
    rows = tl.load(sums + base[:, None] * DIM + column[None], mask=some[:, None] & (column < DIM)[None], other=0.0)
    top = tl.load(tops + base * 2, mask=some, other=float("-inf"))
    weight = tl.load(tops + base * 2 + 1, mask=some, other=0.0)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    highest = tl.maximum(highest, -3.0e38)
    share = tl.where(weight > 0, tl.exp(top - highest), 0.0)
    all_of_it = tl.sum(share * weight, 0)
    if SINKS:
        all_of_it += tl.exp(sink - highest)
    average = tl.sum(rows * share[:, None], 0) / tl.where(all_of_it > 0, all_of_it, 1.0)
    tl.store(mixed + (lane * HEADS + head) * DIM + column, average, mask=column < DIM)
    tl.store(total + lane * HEADS + head, tl.log(all_of_it) + highest)


@triton.jit
def first_seen(here, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the first token that is visible at position `here`."""
    if WINDOW:
        return tl.maximum(here + 1 - WINDOW, 0)
    else:
        return here // CHUNK * CHUNK
