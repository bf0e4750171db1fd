"""Random numbers of PyTorch's distributions, from the words of a counter-based generator.

Each draw takes one block of four words per element from a Stream.  The numbers are not those of PyTorch's own generators.  The
distributions, and the bits per number, are the same.

    uniform       float32 24 bits, float64 53, float16 11, bfloat16 8, in [0, 1): at::transformation::uniform_real
    normal        Box and Muller, "A Note on the Generation of Random Normal Deviates" (1958), from two numbers per element.  The
                  first is in (0, 1] and has 32 bits (float64: 53); the largest result is 6.7 (8.6) standard deviations
    integers      a range r up to 2^31: the high word of 64 random bits times r (Lemire, "Fast Random Integer Generation in an
                  Interval", 2019, without the rejection).  The probability of a value has a relative error of at most r / 2^64,
                  2^-33.  For a larger or variable r: 63 random bits modulo r, at most r / 2^63 (PyTorch: 32 bits modulo r below
                  2^32, 64 above)
    bernoulli     a constant p: 32 bits, an error of at most 2^-33; a tensor of p: 24 bits (float64: 53), as PyTorch
    exponential, cauchy, geometric, log_normal   inverse transform
    randperm      the order of 63-bit integers
    multinomial   without replacement: the order of weight / exponential (Efraimidis and Spirakis, "Weighted random sampling with
                  a reservoir", 2006), as PyTorch; with replacement: the inverse transform, 53 bits
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .philox import Words, block

_LIBRARY = torch.library.Library("cgcompile", "FRAGMENT")
_LIBRARY.define("philox(Tensor element, Tensor shared, int number) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.impl("philox", block, "CompositeExplicitAutograd")
torch.library.register_fake("cgcompile::philox", lambda x, *_: tuple([torch.empty_like(x) for _ in range(4)]), lib=_LIBRARY)

BLOCK = torch.ops.cgcompile.philox.default
"""philox.block as one operator, so that a trace has one node per draw instead of its 150 operations."""

DIGITS = {torch.float16: 11, torch.bfloat16: 8}
"""Bits of a uniform number for dtypes that are too narrow for the 24 bits of float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The random words of one call.  `shared`: the result of philox.schedule.  `numbers`: one for each draw of the program."""

    shared: Tensor
    numbers: Iterator[int]

    def block(self, like: Tensor) -> Words:
        """Returns four words for each element of `like`, on its device and in its memory order."""
        element = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
        words: Words = BLOCK(_in_order_of(element, like), self.shared, next(self.numbers))
        return words


def _in_order_of(values: Tensor, like: Tensor) -> Tensor:
    """Returns one value per element of `like`, in its memory order.  The result is dense, with its axes in the same order."""
    order = axes_in_memory(like)
    inverse = sorted(range(like.dim()), key=lambda axis: order[axis])
    reshaped = values.view([like.shape[axis] for axis in order])
    return reshaped if inverse == order == sorted(order) else reshaped.permute(inverse)


def axes_in_memory(tensor: Tensor) -> list[int]:
    """Returns the axes from outermost to innermost, or 0, 1, ... if a stride depends on data."""
    strides = [stride if isinstance(stride, int) else stride.node.maybe_as_int() or stride.node.hint for stride in tensor.stride()]
    if any(stride is None for stride in strides):
        return list(range(tensor.dim()))
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))


# --- numbers from words -------------------------------------------------------------------------------------------


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of a dtype are computed."""
    return torch.float64 if dtype in (torch.float64, torch.int64, torch.int32) else torch.float32


def uniform01(words: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns numbers in [0, 1), exact multiples of 2^-digits, so that none is rounded up to 1.  float64 takes two words."""
    if dtype == torch.float64:
        return bits53(words).to(dtype) * 2.0**-53
    digits = DIGITS.get(dtype, 24)
    return ((words[0] >> (32 - digits)).to(torch.float32) * 2.0**-digits).to(dtype)


def positive01(words: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns float32 (32 random bits, the smallest is 2^-32) or float64 numbers in (0, 1].  Their logarithms are finite."""
    if dtype == torch.float64:
        return (bits53(words) + 1).to(dtype) * 2.0**-53
    return (words[0].to(dtype) + 1) * 2.0**-32


def normal01(words: Words, dtype: torch.dtype) -> Tensor:
    """Returns standard normal numbers, float32 or float64."""
    radius = (positive01(words, dtype).log() * -2).clamp_min(0).sqrt()  # a fast logarithm may be positive
    return radius * (uniform01(words[2:], dtype) * (2 * math.pi)).cos()


def exponential01(words: Words, dtype: torch.dtype) -> Tensor:
    """Returns exponential numbers of rate 1, never 0, because samplers divide by them.  PyTorch also replaces 0 by half an
    epsilon."""
    return (-positive01(words, dtype).log()).clamp_min(torch.finfo(dtype).eps / 2)


def integers(words: Words, span: int | torch.SymInt | Tensor) -> Tensor:
    """Returns int64 in [0, span).  `span` is at least 1 and below 2^63."""
    if isinstance(span, int) and span <= 1 << 31:
        return (words[1] * span + ((words[0] * span) >> 32)) >> 32
    return bits63(words) % span


def bits63(words: Sequence[Tensor]) -> Tensor:
    """Returns int64 in [0, 2^63)."""
    return ((words[1] & 0x7FFFFFFF) << 32) | words[0]


def bits53(words: Sequence[Tensor]) -> Tensor:
    return ((words[0] >> 5) << 26) | (words[1] >> 6)
