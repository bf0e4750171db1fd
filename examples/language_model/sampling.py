"""From logits to tokens, for each lane as it asks.  A lane's token depends on its logits, parameters, seed and place in the text
alone: not on its neighbours, nor on the number of the lane.

In this order, which is that of transformers: repetition penalty, temperature, top-k, top-p.  Of equal logits all stay or none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .control_flow import cond, while_loop

ALTERNATIVES = 20
"""Likeliest tokens that are log_probabilities with their log-probabilities: as many as OpenAI's `top_logprobs` allows."""

WORD = 0xFFFFFFFF
MULTIPLIER, BUMP = 0xD256D193, 0x9E3779B9
"""Of Philox 2x32-10: Salmon and others, "Parallel random numbers: as easy as 1, 2, 3" (2011)."""


class Sampling(NamedTuple):
    """How each lane's token is chosen; all (batch,).

    `temperature`: 0 takes the likeliest; `top_k`: 0 is all; `top_p`: 1 is all; `penalty`: what logits of tokens that the text has
    are divided by where positive, multiplied with where not, 1 for none; `seed`: its low 32 bits count; `alternatives`: 0 where
    none are asked for.
    float32, int64, float32, float32, int64, int64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    seed: Tensor
    alternatives: Tensor


def sample(logits: Tensor, seen: Tensor, place: Tensor, sampling: Sampling) -> Tensor:
    """The next token of every lane, int64 (batch,).  `logits`: float32 (batch, vocabulary); `seen`: bool, the same shape, which
    tokens the text has; `place`: int64 (batch,), where in the text the new token goes."""
    penalty = sampling.penalty[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def likeliest(logits: Tensor, place: Tensor, temperature: Tensor, *_: Tensor) -> Tensor:
        return logits.argmax(-1)

    def sampled(logits: Tensor, place: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor) -> Tensor:
        warm = (temperature > 0)[:, None]
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        scaled = cond(((top_k > 0) | (top_p < 1)).any(), filtered, lambda x, *_: x.clone(), (scaled, top_k, top_p))
        noise = torch.where(warm, exponential(seed, place, logits.shape[1]).log(), 0.0)
        return (scaled - noise).argmax(-1)  # the largest of p / e, e exponential, is a draw from p

    any_warm = (sampling.temperature > 0).any()
    given = (logits, place, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    return cond(any_warm, sampled, likeliest, given)


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits, -inf where top-k or top-p leave the token out.  The thresholds are found by halving, exactly and without sorting:
    floats as integers have the same order, and 32 halvings of those find each."""
    order = logits.view(torch.int32).to(torch.int64)
    order = torch.where(order < 0, order ^ 0x7FFFFFFF, order)
    least = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1])
    order = torch.where(order >= largest(order, torch.ones_like(logits), least.float())[:, None], order, -(1 << 32))
    weight = torch.where(order > -(1 << 32), (logits - logits.amax(-1, keepdim=True)).exp(), 0.0)
    threshold = largest(order, weight, top_p.clamp(0.0, 1.0) * weight.sum(-1))
    keep = torch.where(top_p < 1, threshold, -(1 << 31))[:, None]
    return torch.where(order >= keep, logits, float("-inf"))


def largest(order: Tensor, weight: Tensor, least: Tensor) -> Tensor:
    """The largest threshold, int64 (batch,), at or above which elements of `order` have together `least` of `weight` (batch,)."""

    def more(low: Tensor, high: Tensor) -> Tensor:
        return (high - low > 1).any()

    def halve(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        middle = (low + high) >> 1
        enough = torch.where(order >= middle[:, None], weight, 0.0).sum(-1) >= least
        return torch.where(enough, middle, low), torch.where(enough, high, middle)

    above = order.amax(-1) + 1
    return while_loop(more, halve, (torch.full_like(above, -(1 << 31)), above))[0]


def exponential(seed: Tensor, place: Tensor, count: int) -> Tensor:
    """Exponentially distributed numbers, float32 (batch, count), neither zero nor infinite: Philox 2x32-10 of the key `seed` and
    the counter (element, place)."""
    element, other = torch.broadcast_tensors(torch.arange(count, device=seed.device) & WORD, (place & WORD)[:, None])
    key = seed[:, None] & WORD
    for turn in range(10):
        product = element * (MULTIPLIER - (1 << 32))  # with 2^32 * element added apart it stays below 2^63
        element, other = (((product >> 32) + element) & WORD) ^ ((key + turn * BUMP) & WORD) ^ other, product & WORD
    uniform = ((element.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


def log_probabilities(logits: Tensor, token: Tensor, alternatives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities before penalty and temperature: of `token` (batch,); and where a lane asks for any, the ALTERNATIVES
    likeliest tokens, int64 (batch, ALTERNATIVES), and theirs; else zeros."""
    total = logits.logsumexp(-1)
    count = min(ALTERNATIVES, logits.shape[1])

    def look(logits: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = logits.topk(count)
        return ids, best - total[:, None]

    def skip(logits: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(logits[:, :count], dtype=torch.int64), torch.zeros_like(logits[:, :count])

    ids, probable = cond((alternatives > 0).any(), look, skip, (logits, total))
    return logits.gather(1, token[:, None])[:, 0] - total, ids, probable
