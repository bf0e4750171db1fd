"""Attention over pages: the cache of keys and values of a language model, cut into pages that requests take and give back.

A page holds PAGE tokens of one request, for every layer.  A *block table* lists the pages of a lane in the order of its tokens.
Page 0 is nobody's: what lanes that are off and tokens that do not count would write goes there, as zeros.

transformers hands queries, keys and values of every layer to the function that is registered as `paged` (its AttentionInterface;
transformers 5.17 and 5.23), with what the model's family adds: soft caps, sinks.  Sliding windows and chunks come from
comparison/probe.py.  Weights, rotary embeddings and norms stay transformers' own; attention and the cache are this file's.
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
"""What this attention is called in transformers."""


def empty_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros.  Those of the host take no memory until somebody writes: a machine that builds for a GPU needs none for its cache."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class Lanes(NamedTuple):
    """Which tokens a call brings.  Every lane has `seq` of them, of which the first `count` count.

    `start` (batch,): how many tokens the lane's pages hold already; `count` (batch,): 0 is a lane that is off;
    `pages` (batch, blocks): the block table.  All int64.
    """

    start: Tensor
    count: Tensor
    pages: Tensor

    def positions(self, seq: int) -> Tensor:
        """Where in its text every token is, int64 (batch, seq); what does not count is at the place of the last one that does."""
        step = torch.arange(seq, device=self.start.device)
        return self.start[:, None] + torch.minimum(step, (self.count - 1).clamp(min=0)[:, None])


class Pages:
    """A call's tokens go into the pages, and attend to all that these hold.

    `keys`, `values`: of each layer (pages, key heads, PAGE, dim); they are written in place.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], layers: Sequence[Layer], lanes: Lanes, seq: int) -> None:
        self.keys, self.values, self.layers, self.lanes, self.seq = keys, values, layers, lanes, seq
        self.start, self.pages, self.batch = lanes.start, lanes.pages, lanes.start.shape[0]

    def places(self) -> Tensor:
        """Where in its text every token is, int64 (batch, seq)."""
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
        """How many tokens every lane has with those of this call, int64 (batch,)."""
        return self.lanes.start + self.lanes.count

    def put(self, kind: str, layer: int, rows: Tensor) -> Tensor:
        """Writes `rows` (batch, key heads, seq, dim) of a call whose lanes end together, and gives all tokens up to those, as many
        as the block table has places for, (batch, key heads, tokens, dim).  `kind`: "keys" or "values"."""
        cache = getattr(self, kind)[layer]
        write(cache, as_wide(rows, cache.shape[3]).transpose(1, 2), self.lanes, last=True)
        return ending_together(cache, self.pages, self.ends(), self.ends())[..., : rows.shape[3]]


class Loop:
    """A loop's tokens stay beside the pages until it ends: a loop may read what a call was given, and writes to what it carries.

    `tail_keys`, `tail_values`: of each layer (batch, key heads, turns, dim), replaced by what `attend` makes; `turn` (): which of
    them this turn's token is.  `start` (batch,): how many tokens the pages hold.  `on_gpu`: where the call runs; a tensor inside of
    a loop's body does not say so while the model is exported on a machine without a GPU.
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
        """Where in its text every token is, int64 (batch, 1)."""
        return (self.start + self.turn)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query (batch, 1, heads, dim), key and value (batch, 1, key heads, dim) -> (batch, 1, heads, dim)."""
        turns = torch.arange(self.tail[0].shape[2], device=query.device)
        tail_keys, tail_values = [
            old.index_copy(2, self.turn.view(1), new.transpose(1, 2))
            for old, new in zip(self.tail[2 * layer : 2 * layer + 2], (key, value), strict=True)
        ]
        self.tail[2 * layer], self.tail[2 * layer + 1] = tail_keys, tail_values
        old, weight = paged_decode(
            query[:, 0], self.keys[layer], self.values[layer], self.pages, self.start + self.turn, self.start, scores.sinks,
            *scores.numbers(), self.on_gpu,
        )  # fmt: skip
        seen = turns <= self.turn
        if scores.window:
            seen = seen & (turns > self.turn - scores.window)
        seen = seen.expand(self.batch, -1)
        if scores.chunk:
            place = self.start + self.turn
            seen = seen & (self.start[:, None] + turns >= (place - place % scores.chunk)[:, None])
        new, more = partials(query[:, 0], tail_keys, tail_values, seen, None, scores.scale, scores.softcap)
        share = torch.sigmoid(weight - more)[..., None]  # exp(weight) / (exp(weight) + exp(more))
        return (old * share + new * (1 - share))[:, None].to(query.dtype)

    def ends(self) -> Tensor:
        """How many tokens every lane has with that of this turn, int64 (batch,)."""
        return self.start + self.turn + 1

    def put(self, kind: str, layer: int, rows: Tensor) -> Tensor:
        """`Pages.put` for one token of each lane, which goes into the tail."""
        cache, place = getattr(self, kind)[layer], 2 * layer + (kind == "values")
        self.tail[place] = self.tail[place].index_copy(2, self.turn.view(1), as_wide(rows, cache.shape[3]))
        return ending_together(cache, self.pages, self.start, self.ends(), self.tail[place])[..., : rows.shape[3]]


class Scores(NamedTuple):
    """How a layer makes probabilities of products: times `scale`, then within `softcap` (0.0: as they are), of the last `window`
    tokens (0: of all) or of the token's own `chunk` (0: of all), beside `sinks` (heads,), which take a share of the probability
    for nothing."""

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
    """What transformers calls: query (1, heads, tokens, dim), key and value (1, key heads, tokens, dim), lane behind lane in
    `tokens` -> (1, tokens, heads, dim).

    No mask is given, because none is registered as `paged`: `cache.layers` says what a token sees.
    """
    layer, dim = cache.layers[module.layer_idx], value.shape[-1]
    by_lane = [as_wide(tensor, layer.dim)[0].transpose(0, 1).unflatten(0, (cache.batch, -1)) for tensor in (query, key, value)]
    if (temperature := getattr(module, "temperature", None)) is not None:
        by_lane[0] = temperature(by_lane[0], cache.places())
    scores = Scores(scaling, layer.window, layer.chunk, softcap or 0.0, s_aux)
    return cache.attend(module.layer_idx, *by_lane, scores).flatten(0, 1)[None, ..., :dim], None


def as_wide(rows: Tensor, dim: int) -> Tensor:
    """Zeros behind the last axis: keys and values of a cache are of one width."""
    return rows if rows.shape[-1] == dim else F.pad(rows, (0, dim - rows.shape[-1]))


AttentionInterface.register(NAME, attention)


def write(cache: Tensor, rows: Tensor, lanes: Lanes, *, last: bool = False) -> None:
    """Puts the first rows of (batch, seq, key heads, dim) that count, or the `last` ones, into a layer's pages.  What does not
    count is zeros on page 0, which never changes."""
    step = torch.arange(rows.shape[1], device=rows.device)
    if last:
        step = step + (lanes.count - rows.shape[1])[:, None]
        counts, places = step >= 0, lanes.start[:, None] + step.clamp(min=0)
    else:
        counts, places = step < lanes.count[:, None], lanes.positions(rows.shape[1])
    page = torch.where(counts, lanes.pages.gather(1, places // PAGE), 0)
    cache[page, :, places % PAGE] = torch.where(counts[..., None, None], rows, 0)


def ending_together(cache: Tensor, pages: Tensor, paged: Tensor, end: Tensor, tail: Tensor | None = None) -> Tensor:
    """The tokens of every lane up to `end` (batch,), as many as its pages have places for, (batch, key heads, tokens, dim).  The
    first `paged` (batch,) of its text are on the pages, the others in `tail` (batch, key heads, turns, dim).

    What stands before a text's first token is some other token's.
    """
    width = pages.shape[1] * PAGE
    place = end[:, None] - width + torch.arange(width, device=end.device)
    inside = place.clamp(0, width - 1)
    rows = cache[pages.gather(1, inside // PAGE), :, inside % PAGE].transpose(1, 2)
    if tail is None:
        return rows.contiguous()  # some models' code takes a view of them
    turn = (place - paged[:, None]).clamp(0, tail.shape[2] - 1)[:, None, :, None].expand(-1, tail.shape[1], -1, tail.shape[3])
    return torch.where((place >= paged[:, None])[:, None, :, None], tail.gather(2, turn), rows)
