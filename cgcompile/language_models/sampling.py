"""Chooses tokens from logits, with parameters for each lane.  A lane's token depends only on its logits, parameters, seed and
position in the text.  It does not depend on other lanes or on the number of the lane.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.  Filters keep either all equal logits or
none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .control_flow import cond, while_loop

ALTERNATIVES = 20
"""Number of likeliest tokens that are returned with their log-probabilities: OpenAI's maximum of `top_logprobs`."""

BIASES = 64
"""Maximum biases that a call sets for a lane."""

WORD_BITS = 32
"""Bits of a word of a mask."""

WORD = 0xFFFFFFFF
LOWEST = -0x7F800001
"""The position of -inf in the order of all floats."""
MULTIPLIER, BUMP = 0xD256D193, 0x9E3779B9
"""Constants of Philox 2x32-10: Salmon and others, "Parallel random numbers: as easy as 1, 2, 3" (2011)."""


class Sampling(NamedTuple):
    """Sampling parameters of each lane; all (batch,).

    `temperature`: 0 takes the likeliest token; `top_k`: 0 is all; `top_p`: 1 is all; `penalty`: divides positive logits and
    multiplies negative logits of tokens that occur in the text, 1 for none; `seed`: its low 32 bits are used; `alternatives`: 0 if
    none are requested; `min_p`: excludes tokens with less than this fraction of the highest probability, 0 for none; `deferred`: 1
    if `choose` chooses the token. float32, int64, float32, float32, int64, int64, float32, int64.
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
"""Values of Sampling that take the likeliest token."""


class Restriction(NamedTuple):
    """Restrictions of a lane's next token: a mask, for example of a grammar, and biases of some tokens.  A slot keeps its biases
    between calls, so that a call passes only changes.  The mask is passed for every token.

    `mask`: int32 (batch, words), a bit for every token, 1 if it is allowed; token 0 is the lowest bit of the first word.  `token`,
    `bias`: int64 and float32 (batch, BIASES), biases to set; a token may occur twice with the same bias.  `fresh`: int64 (batch,),
    1 if the slot drops its earlier biases."""

    mask: Tensor
    token: Tensor
    bias: Tensor
    fresh: Tensor


def sample(logits: Tensor, seen: Tensor, place: Tensor, sampling: Sampling) -> Tensor:
    """Returns the next token of every lane, int64 (batch,).  `logits`: float32 (batch, vocabulary); `seen`: bool, the same shape,
    the tokens that occur in the text; `place`: int64 (batch,), the position of the new token."""
    penalty, warm = sampling.penalty[:, None], sampling.temperature > 0
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits / torch.where(warm, sampling.temperature, 1.0)[:, None]
    filters = warm & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    # Two branches in sequence, not nested: tracing a branch runs it several times, and nesting multiplies the runs.
    operands = logits, sampling.top_k, sampling.top_p, sampling.min_p
    logits = cond(filters.any(), filtered, lambda logits, *_: logits.clone(), operands)

    def drawn(logits: Tensor, place: Tensor, seed: Tensor, warm: Tensor) -> Tensor:
        noise = torch.where(warm[:, None], exponential(seed, place, logits.shape[1]).log(), 0.0)
        return (logits - noise).argmax(-1)  # argmax of p / e with exponential e is a sample of p

    def likeliest(logits: Tensor, place: Tensor, seed: Tensor, warm: Tensor) -> Tensor:
        return logits.argmax(-1)

    return cond(warm.any(), drawn, likeliest, (logits, place, sampling.seed, warm))


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sets the logits to -inf that top-k, top-p or min-p exclude.  Bisection finds the exact thresholds of top-k and top-p without
    sorting.  The bits of floats as integers have the order of the floats, so 32 steps suffice."""
    order = logits.view(torch.int32).to(torch.int64)
    order = torch.where(order < 0, order ^ 0x7FFFFFFF, order)
    least = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1])
    kth = largest(order, torch.ones_like(logits), least.float())
    order = torch.where(order >= kth[:, None], order, -(1 << 32))
    weight = torch.where(order > -(1 << 32), (logits - logits.amax(-1, keepdim=True)).exp(), 0.0)
    threshold = largest(order, weight, top_p.clamp(0.0, 1.0) * weight.sum(-1))
    keep = as_float(torch.maximum(kth, torch.where(top_p < 1, threshold, kth)))
    keep = torch.maximum(keep, logits.amax(-1) + min_p.log())[:, None]
    return torch.where(logits >= keep, logits, float("-inf"))  # compares floats: a build then detects that rounding may decide


def as_float(order: Tensor) -> Tensor:
    """Returns the float32 at an int64 position in the order of all floats.  Positions below -inf return -inf."""
    order = order.clamp(min=LOWEST)
    return torch.where(order < 0, order ^ 0x7FFFFFFF, order).to(torch.int32).view(torch.float32)


def largest(order: Tensor, weight: Tensor, least: Tensor) -> Tensor:
    """Returns the largest threshold, int64 (batch,), for which the `weight` of elements with `order` >= threshold is in total at
    least `least` (batch,)."""

    def more(low: Tensor, high: Tensor, *_: Tensor) -> Tensor:
        return (high - low > 1).any()

    def halve(low: Tensor, high: Tensor, order: Tensor, weight: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        middle = (low + high) >> 1
        enough = torch.where(order >= middle[:, None], weight, 0.0).sum(-1) >= least
        return torch.where(enough, middle, low), torch.where(enough, high, middle)

    above = order.amax(-1) + 1
    return while_loop(more, halve, (torch.full_like(above, -(1 << 31)), above), (order, weight, least))[0]


def exponential(seed: Tensor, place: Tensor, count: int) -> Tensor:
    """Returns exponentially distributed numbers, float32 (batch, count), neither zero nor infinite.  Philox 2x32-10 with the key
    `seed` and the counter (element, place)."""
    element, other = torch.broadcast_tensors(torch.arange(count, device=seed.device) & WORD, (place & WORD)[:, None])
    key = seed[:, None] & WORD
    for turn in range(10):
        product = element * (MULTIPLIER - (1 << 32))  # 2^32 * element is added separately, so that the product stays below 2^63
        element, other = (((product >> 32) + element) & WORD) ^ ((key + turn * BUMP) & WORD) ^ other, product & WORD
    uniform = ((element.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


def log_probability(logits: Tensor, token: Tensor) -> Tensor:
    """Returns the log-probability of `token` (batch,) before penalty and temperature, float32 (batch,)."""
    return logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)


def alternatives(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ALTERNATIVES likeliest tokens, int64 (batch, ALTERNATIVES), and their log-probabilities before penalty and
    temperature; zeros if no lane requests any (`wanted`, (batch,))."""
    count = min(ALTERNATIVES, logits.shape[1])

    def look(logits: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = logits.topk(count)
        return ids, best - logits.logsumexp(-1, keepdim=True)

    def skip(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(logits[:, :count], dtype=torch.int64), torch.zeros_like(logits[:, :count])

    return cond((wanted > 0).any(), look, skip, (logits,))


def words_of(vocabulary: int) -> int:
    """Returns the number of words of a mask."""
    return -(-vocabulary // WORD_BITS)


def with_changes(biases: Tensor, restriction: Restriction) -> Tensor:
    """Returns the biases of every lane, float32 (batch, vocabulary), with the changes of the call."""
    kept = torch.where(restriction.fresh[:, None] > 0, 0.0, biases)
    return kept.scatter(1, restriction.token, restriction.bias)


def restricted(logits: Tensor, biases: Tensor, mask: Tensor) -> Tensor:
    """Adds biases to logits, both float32 (batch, vocabulary), and sets tokens that the mask excludes to -inf."""
    bits = (mask[:, :, None] >> torch.arange(WORD_BITS, device=mask.device, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]] > 0
    return torch.where(allowed, logits + biases, float("-inf"))
