"""Attention over pages: the cache of keys and values of a language model is divided into pages that requests allocate and free.

A page holds PAGE tokens of one request, for every layer.  A *lane* is a row of the batch; a lane without a request is *off*.  A
*block table* lists the pages of a lane in the order of its tokens.  Page 0 belongs to no request: lanes that are off and padding
tokens write zeros to it.

transformers calls the function registered as `paged` (AttentionInterface; transformers 5.17 and 5.23) with queries, keys and values
of every layer, and with options of the model's family: soft caps, sinks.  Sliding windows and chunks come from comparison/probe.py.
Weights, rotary embeddings and norms are those of transformers; attention and the cache are implemented here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from .comparison.probe import Layer
from .kernels.decode import paged_decode, partials
from .kernels.prefill import paged_prefill
from .kernels.processor import paged_attention
from .settings import PAGE

NAME = "paged"
"""The name of this attention in transformers."""


def empty_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros.  On the CPU they take no memory until they are written, so a machine without a GPU can build a model with a
    large cache."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class Lanes(NamedTuple):
    """The tokens of a call.  Every lane has `seq` tokens: the first `count` are used, the others are padding.

    `start` (batch,): tokens already in the lane's pages; `count` (batch,): 0 for a lane that is off; `pages` (batch, blocks): the
    block table.  All int64.
    """

    start: Tensor
    count: Tensor
    pages: Tensor

    def positions(self, seq: int) -> Tensor:
        """Returns the position of every token in its text, int64 (batch, seq); padding has the position of the last used token."""
        step = torch.arange(seq, device=self.start.device)
        return self.start[:, None] + torch.minimum(step, (self.count - 1).clamp(min=0)[:, None])


class Pages:
    """Writes a call's tokens to the pages, and attends to all tokens in them.

    `keys`, `values`: of each layer (pages, key heads, PAGE, dim), written in place.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], layers: Sequence[Layer], lanes: Lanes, seq: int) -> None:
        self.keys, self.values, self.layers, self.lanes, self.seq = keys, values, layers, lanes, seq
        self.start, self.pages, self.batch = lanes.start, lanes.pages, lanes.start.shape[0]

    def places(self) -> Tensor:
        """Returns the position of every token in its text, int64 (batch, seq)."""
        return self.lanes.positions(self.seq)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query (batch, seq, heads, dim), key and value (batch, seq, key heads, dim) -> (batch, seq, heads, dim)."""
        keys, values, lanes = self.keys[layer], self.values[layer], self.lanes
        write(keys, key, lanes)
        write(values, value, lanes)
        if query.device.type == "cpu" and query.dtype == keys.dtype == torch.float32:
            return paged_attention(query, keys, values, lanes.pages, lanes.start, lanes.count, scores.sinks, *scores.numbers())
        if self.seq == 1:
            mixed, _ = paged_decode(
                query[:, 0], keys, values, lanes.pages, lanes.start, lanes.start + lanes.count, scores.sinks, *scores.numbers(),
                query.device.type != "cpu",
            )  # fmt: skip
            return mixed[:, None].to(query.dtype)
        return paged_prefill(query, keys, values, lanes.pages, lanes.start, lanes.count, scores.sinks, *scores.numbers())

    def ends(self) -> Tensor:
        """Returns the number of tokens of every lane, including those of this call, int64 (batch,)."""
        return self.lanes.start + self.lanes.count

    def put(self, kind: str, layer: int, rows: Tensor) -> Tensor:
        """Writes the used tokens of `rows` (batch, key heads, seq, dim), which is padded on the left.  Returns the rows of each
        lane's last tokens, including these: (batch, key heads, tokens, dim), with as many tokens as the block table can hold.
        `kind`: "keys" or "values"."""
        cache = getattr(self, kind)[layer]
        write(cache, as_wide(rows, cache.shape[3]).transpose(1, 2), self.lanes, last=True)
        return ending_together(cache, self.pages, self.ends(), self.ends())[..., : rows.shape[3]]


class Loop:
    """Keeps the tokens of a loop outside the pages until it ends, because its body can only write tensors that it carries.

    `tail`: keys, then values, of each layer, (batch, key heads, turns, dim); `attend` replaces them.  `turn` (): the index of the
    iteration.  `start` (batch,): tokens in the pages.  `on_gpu`: whether the call runs on a GPU.  The body's tensors do not show
    this if the model is exported without a GPU.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], layers: Sequence[Layer], tail: Sequence[Tensor], pages: Tensor,
        start: Tensor, turn: Tensor, on_gpu: bool,
    ) -> None:  # fmt: skip
        self.keys, self.values, self.layers, self.pages, self.start, self.turn = keys, values, layers, pages, start, turn
        self.on_gpu = on_gpu
        self.batch, self.seq = start.shape[0], 1
        self.tail = list(tail)

    def places(self) -> Tensor:
        """Returns the position of every token in its text, int64 (batch, 1)."""
        return (self.start + self.turn)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query (batch, 1, heads, dim), key and value (batch, 1, key heads, dim) -> (batch, 1, heads, dim)."""
        turns = torch.arange(self.tail[0].shape[2], device=query.device)
        tail_keys, tail_values = [
            rows.index_copy(2, self.turn.view(1), new.transpose(1, 2))
            for rows, new in zip(self.tail[2 * layer : 2 * layer + 2], (key, value), strict=True)
        ]
        self.tail[2 * layer], self.tail[2 * layer + 1] = tail_keys, tail_values
        from_pages, pages_weight = paged_decode(
            query[:, 0], self.keys[layer], self.values[layer], self.pages, self.start + self.turn, self.start, scores.sinks,
            *scores.numbers(), self.on_gpu,
        )  # fmt: skip
        visible = turns <= self.turn
        if scores.window:
            visible = visible & (turns > self.turn - scores.window)
        visible = visible.expand(self.batch, -1)
        if scores.chunk:
            position = self.start + self.turn
            visible = visible & (self.start[:, None] + turns >= (position - position % scores.chunk)[:, None])
        from_tail, tail_weight = partials(query[:, 0], tail_keys, tail_values, visible, None, scores.scale, scores.softcap)
        share = torch.sigmoid(pages_weight - tail_weight)[..., None]  # exp(pages_weight) / (exp(pages_weight) + exp(tail_weight))
        return (from_pages * share + from_tail * (1 - share))[:, None].to(query.dtype)

    def ends(self) -> Tensor:
        """Returns the number of tokens of every lane, including that of this iteration, int64 (batch,)."""
        return self.start + self.turn + 1

    def put(self, kind: str, layer: int, rows: Tensor) -> Tensor:
        """Does what `Pages.put` does, for one token of each lane, which is written to the tail."""
        cache, index = getattr(self, kind)[layer], 2 * layer + (kind == "values")
        self.tail[index] = self.tail[index].index_copy(2, self.turn.view(1), as_wide(rows, cache.shape[3]))
        return ending_together(cache, self.pages, self.start, self.ends(), self.tail[index])[..., : rows.shape[3]]


class Scores(NamedTuple):
    """How a layer computes probabilities from the products of queries and keys.  Products are multiplied by `scale` and limited by
    `softcap` (0.0: no limit).  A token sees the last `window` tokens (0: all), or those in its chunk of `chunk` tokens (0: all).
    `sinks` (heads,): additional logits of the softmax, to which no values belong."""

    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None

    def numbers(self) -> tuple[float, int, int, float]:
        return self.scale, self.window, self.chunk, self.softcap


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    scaling: float, cache: Any, softcap: float | None = None, s_aux: Tensor | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: query (1, heads, tokens, dim), key and value (1, key heads, tokens, dim), with the
    lanes concatenated in `tokens` -> (1, tokens, heads, dim).

    `attention_mask` is None, because no mask function is registered as `paged`; `cache.layers` defines which tokens are visible.
    """
    layer, dim = cache.layers[module.layer_idx], value.shape[-1]
    by_lane = [as_wide(tensor, layer.dim)[0].transpose(0, 1).unflatten(0, (cache.batch, -1)) for tensor in (query, key, value)]
    if (temperature := getattr(module, "temperature", None)) is not None:
        by_lane[0] = temperature(by_lane[0], cache.places())
    scores = Scores(scaling, layer.window, layer.chunk, softcap or 0.0, s_aux)
    return cache.attend(module.layer_idx, *by_lane, scores).flatten(0, 1)[None, ..., :dim], None


def as_wide(rows: Tensor, dim: int) -> Tensor:
    """Pads the last axis to `dim` with zeros, because the keys and values of a layer have one width in the cache."""
    return rows if rows.shape[-1] == dim else F.pad(rows, (0, dim - rows.shape[-1]))


AttentionInterface.register(NAME, attention)


def write(cache: Tensor, rows: Tensor, lanes: Lanes, *, last: bool = False) -> None:
    """Writes the first `count` of each lane's `rows` (batch, seq, key heads, dim), or the `last` ones, to a layer's pages.  Padding
    writes zeros to page 0, which therefore stays zero."""
    step = torch.arange(rows.shape[1], device=rows.device)
    if last:
        step = step + (lanes.count - rows.shape[1])[:, None]
        used, places = step >= 0, lanes.start[:, None] + step.clamp(min=0)
    else:
        used, places = step < lanes.count[:, None], lanes.positions(rows.shape[1])
    page = torch.where(used, lanes.pages.gather(1, places // PAGE), 0)
    cache[page, :, places % PAGE] = torch.where(used[..., None, None], rows, 0)


def ending_together(cache: Tensor, pages: Tensor, paged: Tensor, end: Tensor, tail: Tensor | None = None) -> Tensor:
    """Returns the rows of every lane's last tokens before position `end` (batch,): (batch, key heads, tokens, dim), with as many
    tokens as its pages can hold.  The first `paged` (batch,) tokens of a text are in the pages, the others in `tail` (batch, key
    heads, turns, dim).

    Rows before a text's first token contain data of other tokens; the attention mask excludes them.
    """
    width = pages.shape[1] * PAGE
    position = end[:, None] - width + torch.arange(width, device=end.device)
    inside = position.clamp(0, width - 1)
    rows = cache[pages.gather(1, inside // PAGE), :, inside % PAGE].transpose(1, 2)
    if tail is None:
        return rows.contiguous()  # some models call view() on them
    turn = (position - paged[:, None]).clamp(0, tail.shape[2] - 1)[:, None, :, None].expand(-1, tail.shape[1], -1, tail.shape[3])
    return torch.where((position >= paged[:, None])[:, None, :, None], tail.gather(2, turn), rows)
