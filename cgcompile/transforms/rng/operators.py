"""The random operators of PyTorch, each as a function of a Stream and of the operator's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .distributions import Stream, bits53, bits63, exponential01, integers, normal01, positive01, uniform01, wide
from .philox import Words

aten = torch.ops.aten

Size: TypeAlias = Sequence[int | torch.SymInt]
Limit: TypeAlias = int | torch.SymInt
Dtype: TypeAlias = torch.dtype | None
Device: TypeAlias = torch.device | None
Operator: TypeAlias = Callable[..., Any]


def _uniform(stream: Stream, x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return _between(uniform01(stream.block(x), x.dtype), low, high)


def _between(unit: Tensor, low: float, high: float) -> Tensor:
    """Scales [0, 1) to [low, high).  A number that is rounded to `high` becomes `low`, as in PyTorch's CUDA kernels."""
    if (low, high) == (0, 1):
        return unit
    scaled = (unit.to(wide(unit.dtype)) * (high - low) + low).to(unit.dtype)
    return scaled.masked_fill(scaled >= high, low)


def _normal(stream: Stream, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    numbers = _normal_wide(stream, x)
    return (numbers if (mean, std) == (0, 1) else numbers * std + mean).to(x.dtype)


def _normal_wide(stream: Stream, x: Tensor) -> Tensor:
    return normal01(stream.block(x), wide(x.dtype))


def _normal_around(stream: Stream, mean: Tensor | float, std: Tensor | float = 1.0, **_: Any) -> Tensor:
    """Implements normal() with a tensor of means, of standard deviations, or both, which broadcast."""
    tensors = [parameter for parameter in (mean, std) if isinstance(parameter, Tensor)]
    like = torch.empty_like(torch.add(*tensors) if len(tensors) == 2 else tensors[0])
    return (_normal_wide(stream, like) * std + mean).to(like.dtype)


def _log_normal(stream: Stream, x: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return (_normal_wide(stream, x) * std + mean).exp().to(x.dtype)


def _exponential(stream: Stream, x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    return (exponential01(stream.block(x), wide(x.dtype)) / rate).to(x.dtype)


def _cauchy(stream: Stream, x: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    """Takes the tangent of an odd multiple of pi * 2^-25 (float64: pi * 2^-54), which is never pi / 2."""
    words, dtype = stream.block(x), wide(x.dtype)
    odd, digits = (bits53(words) - (1 << 52), 53) if dtype == torch.float64 else ((words[0] >> 8) - (1 << 23), 24)
    angle = (odd * 2 + 1).to(dtype) * (math.pi * 2.0 ** -(digits + 1))
    return (angle.tan() * sigma + median).to(x.dtype)


def _geometric(stream: Stream, x: Tensor, p: float, **_: Any) -> Tensor:
    drawn = positive01(stream.block(x), wide(x.dtype)).log()
    return (drawn / math.log1p(-p)).ceil().clamp_min(1).to(x.dtype)


def _happens(stream: Stream, like: Tensor, p: float) -> Tensor:
    """Returns bools that are true with probability p, by comparing integers."""
    return stream.block(like)[0] < round(p * (1 << 32))


def _bernoulli(stream: Stream, x: Tensor, p: Tensor | float | None = None, **_: Any) -> Tensor:
    """Draws with the probabilities `p`, or with those in `x` if `p` is None."""
    p = x if p is None else p
    if not isinstance(p, Tensor):
        return _happens(stream, x, p).to(x.dtype)
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return (uniform01(stream.block(x), dtype) < p.to(dtype)).to(x.dtype)


def _bernoulli_half(stream: Stream, x: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    return _bernoulli(stream, x, p)


def _native_dropout(stream: Stream, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    keep_mask = _happens(stream, torch.empty_like(x), 1 - p)
    return x * keep_mask * (1 / (1 - p) if p < 1 else 0.0), keep_mask


def _dropout(stream: Stream, x: Tensor, p: float, train: bool) -> Tensor:
    return _native_dropout(stream, x, p)[0]


def _attention(
    stream: Stream, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Uses PyTorch's unfused operations, which include the dropout.  A fused kernel would draw numbers of PyTorch's generator."""
    outputs = aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    attention: Tensor = outputs[0]
    return attention


def _rrelu(
    stream: Stream, x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_: Any
) -> Tensor:  # fmt: skip
    output, slopes = _rrelu_functional(stream, x, noise, lower, upper)
    noise.copy_(slopes)
    return output


def _rrelu_functional(
    stream: Stream, x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    drawn = _uniform(stream, torch.empty_like(x), lower, upper)
    slopes = torch.where(x <= 0, drawn, torch.ones_like(x))
    return x * slopes, slopes


def _rand(stream: Stream, size: Size, *, dtype: Dtype = None, device: Device = None, **_: Any) -> Tensor:
    return _uniform(stream, torch.empty(size, dtype=dtype, device=device))


def _randn(stream: Stream, size: Size, *, dtype: Dtype = None, device: Device = None, **_: Any) -> Tensor:
    return _normal(stream, torch.empty(size, dtype=dtype, device=device))


def _normal_of_size(
    stream: Stream, mean: float, std: float, size: Size, *, dtype: Dtype = None, device: Device = None, **_: Any
) -> Tensor:
    return _normal(stream, torch.empty(size, dtype=dtype, device=device), mean, std)


def _rand_like(stream: Stream, x: Tensor, **options: Any) -> Tensor:
    return _uniform(stream, _like(x, **options))


def _randn_like(stream: Stream, x: Tensor, **options: Any) -> Tensor:
    return _normal(stream, _like(x, **options))


def _like(x: Tensor, *, dtype: Dtype = None, memory_format: torch.memory_format | None = None, **_: Any) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format or torch.preserve_format)


def _randint_low(
    stream: Stream, low: Limit, high: Limit, size: Size, *, dtype: Dtype = None, device: Device = None, **_: Any
) -> Tensor:
    return _within(stream, torch.empty(size, dtype=dtype or torch.int64, device=device), low, high)


def _randint(stream: Stream, high: Limit, size: Size, **options: Any) -> Tensor:
    return _randint_low(stream, 0, high, size, **options)


def _randint_like_low(stream: Stream, x: Tensor, low: Limit, high: Limit, **options: Any) -> Tensor:
    return _within(stream, _like(x, **options), low, high)


def _randint_like(stream: Stream, x: Tensor, high: Limit | Tensor, **options: Any) -> Tensor:
    like = _like(x, **options)
    return integers(stream.block(like), high).to(like.dtype) if isinstance(high, Tensor) else _within(stream, like, 0, high)


def _within(stream: Stream, like: Tensor, low: Limit, high: Limit) -> Tensor:
    """Returns integers in [low, high), in the dtype of `like`."""
    words = stream.block(like)
    if isinstance(low, int) and isinstance(high, int) and high - low >= 1 << 63:
        return _folded(words, low, high - 1).to(like.dtype)
    return (integers(words, high - low) + low).to(like.dtype)


def _folded(words: Words, low: int, last: int) -> Tensor:
    """Returns int64 in [low, last], a range of at least 2^63 numbers.  Maps 64 random bits outside the range into it."""
    sign = 1 << 31
    drawn = ((words[1] ^ sign) - sign) * (1 << 32) + words[0]
    below, above = last - (drawn & ((1 << 63) - 1)), (drawn.clamp_min(last) - last - 1).clamp_min(0) + low
    return torch.where(drawn < low, below, torch.where(drawn > last, above, drawn))


def _random_from(stream: Stream, x: Tensor, low: int, high: int | None, **_: Any) -> Tensor:
    return _within(stream, x, low, _last(x.dtype) + 1 if high is None else high)


def _random_to(stream: Stream, x: Tensor, high: int, **_: Any) -> Tensor:
    return _within(stream, x, 0, high)


def _random(stream: Stream, x: Tensor, **_: Any) -> Tensor:
    return _random_from(stream, x, 0, None)


def _last(dtype: torch.dtype) -> int:
    """Returns the largest number of random_() without limits.  For a floating dtype, every integer up to it is exact."""
    if dtype == torch.bool:
        return 1
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _randperm(stream: Stream, count: Limit, *, dtype: Dtype = None, device: Device = None, **_: Any) -> Tensor:
    keys = bits63(stream.block(torch.empty([count], dtype=torch.int64, device=device)))
    return keys.argsort().to(dtype or torch.int64)


def _multinomial(stream: Stream, x: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """Returns int64 [..., count] for weights [..., categories].

    Without replacement: the categories with the largest weight / exponential number; weights of 0 come last.  With replacement: the
    position of a uniform number among the cumulative sums of the weights, in float64, so that it is below their total.
    """
    if not replacement:
        quotients = x.to(wide(x.dtype)) / exponential01(stream.block(torch.empty_like(x)), wide(x.dtype))
        return quotients.argmax(-1, keepdim=True) if count == 1 else quotients.topk(count, -1).indices
    sums = x.double().cumsum(-1)
    drawn = uniform01(stream.block(x.new_empty([*x.shape[:-1], count])), torch.float64) * sums[..., -1:]
    return (sums.unsqueeze(-2) <= drawn.unsqueeze(-1)).sum(-1)


def _into(function: Operator, stream: Stream, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Writes the result of `function` to the first argument, and returns it."""
    return x.copy_(function(stream, x, *args, **options))


def _rrelu_into(stream: Stream, x: Tensor, noise: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.copy_(_rrelu(stream, x, noise, *args, **options))


LEAVES: Mapping[torch._ops.OpOverload, Operator] = {
    **dict.fromkeys((aten.rand.default, aten.rand.generator), _rand),
    **dict.fromkeys((aten.randn.default, aten.randn.generator), _randn),
    **dict.fromkeys((aten.rand_like.default, aten.rand_like.generator), _rand_like),
    **dict.fromkeys((aten.randn_like.default, aten.randn_like.generator), _randn_like),
    **dict.fromkeys((aten.randint.default, aten.randint.generator), _randint),
    **dict.fromkeys((aten.randint.low, aten.randint.low_generator), _randint_low),
    **dict.fromkeys(
        (aten.randint_like.default, aten.randint_like.generator, aten.randint_like.Tensor, aten.randint_like.Tensor_generator),
        _randint_like,
    ),
    **dict.fromkeys((aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype), _randint_like_low),
    **dict.fromkeys((aten.randperm.default, aten.randperm.generator), _randperm),
    aten.multinomial.default: _multinomial,
    aten.random.default: _random,
    aten.random.to: _random_to,
    getattr(aten.random, "from"): _random_from,
    aten.random_.default: partial(_into, _random),
    aten.random_.to: partial(_into, _random_to),
    getattr(aten.random_, "from"): partial(_into, _random_from),
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor), _bernoulli),
    aten.bernoulli_.float: partial(_into, _bernoulli_half),
    aten.bernoulli_.Tensor: partial(_into, _bernoulli),
    aten.uniform.default: _uniform,
    aten.uniform_.default: partial(_into, _uniform),
    aten.normal_functional.default: _normal,
    aten.normal_.default: partial(_into, _normal),
    aten.normal.float_float: _normal_of_size,
    **dict.fromkeys((aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor), _normal_around),
    aten.log_normal.default: _log_normal,
    aten.log_normal_.default: partial(_into, _log_normal),
    aten.exponential.default: _exponential,
    aten.exponential_.default: partial(_into, _exponential),
    aten.cauchy.default: _cauchy,
    aten.cauchy_.default: partial(_into, _cauchy),
    aten.geometric.default: _geometric,
    aten.geometric_.default: partial(_into, _geometric),
    aten.native_dropout.default: _native_dropout,
    aten.dropout.default: _dropout,
    aten.dropout_.default: partial(_into, _dropout),
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: _rrelu_into,
    aten.rrelu_with_noise_functional.default: _rrelu_functional,
    aten.scaled_dot_product_attention.default: _attention,
}
"""The function that replaces each operator."""

COMPOSITES: frozenset[torch._ops.OpOverload] = frozenset({
    aten.alpha_dropout.default,
    aten.alpha_dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
    aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
    aten.rrelu.default,
    aten.rrelu_.default,
})  # fmt: skip
"""Operators that PyTorch decomposes to those in LEAVES."""
