"""From logits to tokens, for each lane as it asks.  A lane's token depends on its logits, parameters, seed and place in the text
alone: not on its neighbours, nor on the number of the lane.

In this order, which is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.  Of equal logits all stay or
none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .control_flow import cond, while_loop

ALTERNATIVES = 20
"""Likeliest tokens that are log_probabilities with their log-probabilities: as many as OpenAI's `top_logprobs` allows."""

BIASES = 64
"""Biases that a call may set for a lane."""

WORD_BITS = 32
"""Of a word of a mask."""

WORD = 0xFFFFFFFF
LOWEST = -0x7F800001
"""The place of -inf in the order of all floats."""
MULTIPLIER, BUMP = 0xD256D193, 0x9E3779B9
"""Of Philox 2x32-10: Salmon and others, "Parallel random numbers: as easy as 1, 2, 3" (2011)."""


class Sampling(NamedTuple):
    """How each lane's token is chosen; all (batch,).

    `temperature`: 0 takes the likeliest; `top_k`: 0 is all; `top_p`: 1 is all; `penalty`: what logits of tokens that the text has
    are divided by where positive, multiplied with where not, 1 for none; `seed`: its low 32 bits count; `alternatives`: 0 where
    none are asked for; `min_p`: tokens that have less of the likeliest one's probability are left out, 0 is none; `deferred`: 1
    where `choose` chooses the token.
    float32, int64, float32, float32, int64, int64, float32, int64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    seed: Tensor
    alternatives: Tensor
    min_p: Tensor
    deferred: Tensor


GREEDY = (0.0, 0, 1.0, 1.0, 0, 0, 0.0, 0)
"""The likeliest token, by the fields of Sampling."""


class Restriction(NamedTuple):
    """What a lane's next token is restricted by: a mask, as a grammar gives it, and biases of some tokens.  A slot keeps its biases
    from token to token, so that a call brings those alone that change; a mask is new at every token.

    `mask`: int32 (batch, words), a bit for every token, the lowest of the first word for token 0; 1 where the token may come.
    `token`, `bias`: int64 and float32 (batch, BIASES): biases that the slot has from now on; a token may come twice with the same
    bias.  `fresh`: int64 (batch,), 1 where the slot forgets its earlier biases."""

    mask: Tensor
    token: Tensor
    bias: Tensor
    fresh: Tensor


def sample(logits: Tensor, seen: Tensor, place: Tensor, sampling: Sampling) -> Tensor:
    """The next token of every lane, int64 (batch,).  `logits`: float32 (batch, vocabulary); `seen`: bool, the same shape, which
    tokens the text has; `place`: int64 (batch,), where in the text the new token goes."""
    penalty, warm = sampling.penalty[:, None], sampling.temperature > 0
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits / torch.where(warm, sampling.temperature, 1.0)[:, None]
    some = warm & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    # side by side, not inside each other: tracing a branch takes several runs of it, and those of one inside are multiplied
    operands = logits, sampling.top_k, sampling.top_p, sampling.min_p
    logits = cond(some.any(), filtered, lambda logits, *_: logits.clone(), operands)

    def drawn(logits: Tensor, place: Tensor, seed: Tensor, warm: Tensor) -> Tensor:
        noise = torch.where(warm[:, None], exponential(seed, place, logits.shape[1]).log(), 0.0)
        return (logits - noise).argmax(-1)  # the largest of p / e, e exponential, is a draw from p

    def likeliest(logits: Tensor, place: Tensor, seed: Tensor, warm: Tensor) -> Tensor:
        return logits.argmax(-1)

    return cond(warm.any(), drawn, likeliest, (logits, place, sampling.seed, warm))


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits, -inf where top-k, top-p or min-p leave the token out.  The first two thresholds are found by halving, exactly and
    without sorting: floats as integers have the same order, and 32 halvings of those find each."""
    order = logits.view(torch.int32).to(torch.int64)
    order = torch.where(order < 0, order ^ 0x7FFFFFFF, order)
    least = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1])
    most = largest(order, torch.ones_like(logits), least.float())
    order = torch.where(order >= most[:, None], order, -(1 << 32))
    weight = torch.where(order > -(1 << 32), (logits - logits.amax(-1, keepdim=True)).exp(), 0.0)
    threshold = largest(order, weight, top_p.clamp(0.0, 1.0) * weight.sum(-1))
    keep = as_float(torch.maximum(most, torch.where(top_p < 1, threshold, most)))
    keep = torch.maximum(keep, logits.amax(-1) + min_p.log())[:, None]
    return torch.where(logits >= keep, logits, float("-inf"))  # of floats: a build sees that rounding may decide


def as_float(order: Tensor) -> Tensor:
    """The float32 of a place in the order of all floats, int64; what is below them is -inf."""
    order = order.clamp(min=LOWEST)
    return torch.where(order < 0, order ^ 0x7FFFFFFF, order).to(torch.int32).view(torch.float32)


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


def log_probability(logits: Tensor, token: Tensor) -> Tensor:
    """Of `token` (batch,), before penalty and temperature, float32 (batch,)."""
    return logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)


def alternatives(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The ALTERNATIVES likeliest tokens, int64 (batch, ALTERNATIVES), and their log-probabilities before penalty and temperature;
    zeros where no lane asks for any (`wanted`, (batch,))."""
    count = min(ALTERNATIVES, logits.shape[1])

    def look(logits: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = logits.topk(count)
        return ids, best - logits.logsumexp(-1, keepdim=True)

    def skip(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(logits[:, :count], dtype=torch.int64), torch.zeros_like(logits[:, :count])

    return cond((wanted > 0).any(), look, skip, (logits,))


def words_of(vocabulary: int) -> int:
    """Words of a mask for so many tokens."""
    return -(-vocabulary // WORD_BITS)


def with_changes(biases: Tensor, restriction: Restriction) -> Tensor:
    """The biases of every lane, float32 (batch, vocabulary), with those that the call sets."""
    kept = torch.where(restriction.fresh[:, None] > 0, 0.0, biases)
    return kept.scatter(1, restriction.token, restriction.bias)


def restricted(logits: Tensor, biases: Tensor, mask: Tensor) -> Tensor:
    """The logits with their biases, both float32 (batch, vocabulary); -inf where the mask leaves a token out."""
    bits = (mask[:, :, None] >> torch.arange(WORD_BITS, device=mask.device, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]] > 0
    return torch.where(allowed, logits + biases, float("-inf"))
