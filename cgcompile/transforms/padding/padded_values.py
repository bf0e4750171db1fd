"""A value of a program at two sizes of a dimension: unpadded (short), and padded (long).

Each operator is tried separately, also with input values that occur in no drawn example.  So one operator, such as a comparison
after a sum, cannot hide a change by the operator before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Spot = tuple[slice | torch.Tensor, ...]
"""For every axis, the positions of the short tensor's elements in the long one."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How values are changed.

    `sign`: the call's elements become lower than all padded ones (-1), higher (1), or zeros (0), so that a sum shows every padded
    addend.  `mixed`: random numbers instead of zeros.  `indices`: integers may be indices into another tensor, and stay in their
    range.  `entrywise`: the operator does not combine elements, so values of any magnitude are tried, also `literal`.  Only values
    above a threshold show the threshold.  Only values equal to `literal` show a comparison with it.
    """

    sign: int
    mixed: bool = False
    indices: bool = False
    entrywise: bool = False
    literal: float = 0


FAR = 4.0
"""Values are moved by one to two times this distance, which changes results that combine them.  The scores of attention over such
values stay smaller in magnitude than the -10000 with which some models mask scores."""

WIDE = {torch.float16: 1e4}
"""The magnitude of values for operators that do not combine elements.  Other dtypes have 1e12, integers a million."""

ORDINARY = 5000.0
"""Numbers of larger magnitude are masks that are added to scores.  Changed values must still mask."""

COARSE = {torch.float32: 2.0**11, torch.float64: 2.0**20}
"""Units in the last place of the largest value by which kernels for two sizes may differ; 8 for dtypes of 16 bits and less.
Attention over the tried values reaches 2**8 (measured for float32)."""


DRAWN = 262_139
"""The most random numbers that are drawn; larger tensors repeat them.  The number is prime, so that no axis has the same period."""


@dataclass(frozen=True, slots=True, eq=False)
class PaddedValue:
    """The value of a node at the short size and at the long one, a tensor or a number.

    `spot`: the positions of `short` in `long`, () if both are the same.  `fixed`: a mask for `padded_part`, of the padded elements
    of `long` that no input of the call changes; None if there are none.  `depends`: the value depends on an input.  `why`: the
    reason if `short` is not in `long`, or if other padding would change it there, else "".  No operator may use a value with a
    reason.
    """

    short: Any
    long: Any
    spot: Spot = ()
    fixed: torch.Tensor | None = None
    depends: bool = False
    why: str = ""

    def varied(self, variation: Variation, generator: torch.Generator) -> tuple[Any, Any]:
        """Returns (short, long) with other elements in the call's part and in the padded part, except for fixed ones."""
        if not self.depends or not isinstance(self.short, torch.Tensor):
            return self.short, self.long
        part = padded_part(self.spot, self.long.shape)
        padded = self.long[part] if self.spot else self.long.new_empty(0)
        short, free = _varied(self.short, self.long, padded, self.fixed, variation, generator)
        short = _laid_out(short, self.short)
        if not self.spot:
            return short, short
        long = torch.empty_like(self.long)
        long[part] = free if self.fixed is None else torch.where(self.fixed, padded, free)
        long[_grid(self.spot, long.shape)] = short
        return short, long


@dataclass(frozen=True, slots=True)
class PaddedDimension:
    """The dimension `name` at `sizes`, the short and the long one.

    `last`: the call's elements are the last ones of a frame (a padded input), not the first.  `generator`: draws values for trials.
    """

    name: str
    sizes: tuple[int, int]
    last: bool
    generator: torch.Generator

    def framed(self, short: torch.Tensor, frame: torch.Tensor, fixed: bool) -> PaddedValue:
        """Returns an input of the call inside a frame.  `fixed`: the frame's other elements are the same for every call."""
        if short.shape == frame.shape:
            return PaddedValue(short, short, depends=True)
        start = (
            frame.dim() * [0] if not self.last else [large - small for small, large in zip(short.shape, frame.shape, strict=True)]
        )
        spot = tuple(
            [
                slice(None) if small == large else slice(at, at + small)
                for at, small, large in zip(start, short.shape, frame.shape, strict=True)
            ]
        )
        mask = torch.ones_like(frame[padded_part(spot, frame.shape)], dtype=torch.bool) if fixed else None
        return PaddedValue(short, placed(frame, spot, short), spot, mask, depends=True)


def front(value: torch.Tensor, spot: Spot) -> torch.Tensor:
    """Returns the elements of a long tensor at `spot`."""
    return value[_grid(spot, value.shape)] if spot else value


def placed(value: torch.Tensor, spot: Spot, short: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a long tensor with the short one at `spot`.  Keeps the order of axes in memory, because views need it."""
    copy = value.clone()
    copy[_grid(spot, value.shape)] = short
    return copy


def padded_part(spot: Spot, shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns slices of a part that contains all elements outside `spot`: only these if they all follow or precede `spot` along one
    axis, else the whole tensor."""
    inner = [axis for axis, (part, size) in enumerate(zip(spot, shape, strict=True)) if not _covers(part, size)] if spot else []
    inner_part = spot[inner[0]] if len(inner) == 1 else None
    if not isinstance(inner_part, slice) or (inner_part.start and inner_part.stop != shape[inner[0]]):
        return ()
    outside = slice(0, inner_part.start) if inner_part.start else slice(inner_part.stop, None)
    return (*[slice(None)] * inner[0], outside)


def same_spot(one: Sequence[Any], other: Sequence[Any]) -> bool:
    if len(one) != len(other):
        return False
    rows = zip(one, other, strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b for a, b in rows
    )


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the value with its axes in the memory order of `like`."""
    return value if value.stride() == like.stride() else torch.empty_like(like).copy_(value)


def _covers(part: slice | torch.Tensor, size: int) -> bool:
    return isinstance(part, slice) and part.indices(size) == (0, size, 1)


def _grid(spot: Spot, shape: Sequence[int]) -> tuple[Any, ...]:
    if all(isinstance(part, slice) for part in spot):
        return spot
    device = next(part.device for part in spot if isinstance(part, torch.Tensor))
    rows = [
        torch.arange(size, device=device)[part] if isinstance(part, slice) else part for part, size in zip(spot, shape, strict=True)
    ]
    return tuple([row.view(-1, *[1] * (len(rows) - 1 - axis)) for axis, row in enumerate(rows)])


def spots(short: torch.Tensor, long: torch.Tensor, sizes: tuple[int, int], last: bool) -> Iterator[Spot]:
    """Yields the spots where the short tensor may be in the long one, likeliest first.  `sizes`, `last`: as in PaddedDimension."""
    axes = [list(_axis(*extents, *sizes, last, long.device)) for extents in zip(short.shape, long.shape, strict=True)]
    yield from itertools.islice(itertools.product(*axes), 256)


def _axis(small: int, large: int, short: int, long: int, last: bool, device: torch.device) -> Iterator[slice | torch.Tensor]:
    if small == large:
        yield slice(None)
        return
    if small > large:
        return
    extra = large - small
    starts = [extra, 0] if last else [0, extra]
    for start in dict.fromkeys([*starts, extra // 2]):
        yield slice(start, start + small)
    rows = torch.arange(long - short, long, device=device) if last else torch.arange(short, device=device)
    times = small // short
    if small % short == 0 and large == times * long:  # the axis is merged with others, as (batch, seq)
        for inner in [divisor for divisor in range(1, times) if times % divisor == 0]:
            outer = torch.arange(times // inner, device=device).view(-1, 1, 1) * long
            yield ((outer + rows.view(1, -1, 1)) * inner + torch.arange(inner, device=device)).flatten()
    if small - short == large - long:  # other elements precede or follow
        extra_rows = torch.arange(small - short, device=device)
        yield torch.cat([extra_rows, rows + small - short] if last else [rows, extra_rows + long])


def alike(want: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the results of kernels for two sizes are equal up to rounding."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if torch.equal(want, got):
        return True
    if not (want.is_floating_point() or want.is_complex()):
        return False
    bound = COARSE.get(want.dtype, 8.0) * torch.finfo(want.dtype).eps
    one, other = _wide(want), _wide(got)
    differ = ~same(one, other)
    if not bool(differ.any()):
        return True
    finite = one.isfinite() & other.isfinite()
    if bool((differ & ~finite).any()):
        return False
    return bool((one - other).abs()[differ].max() <= bound * one[finite].abs().max())


def same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns which elements are equal, or both NaN."""
    if one.is_floating_point():
        one, other = _wide(one), _wide(other)
    equal = one == other
    return equal | ((one != one) & (other != other)) if one.is_floating_point() or one.is_complex() else equal


def _wide(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    return value if value.dtype == torch.float64 else value.to(torch.float32)


def _varied(
    short: torch.Tensor,
    long: torch.Tensor,
    padded: torch.Tensor,
    fixed: torch.Tensor | None,
    variation: Variation,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns other elements for the call, and for the `padded` ones.  `fixed`: the mask of fixed padded elements."""
    if not long.numel():
        return short, padded
    if short.dtype == torch.bool:
        if variation.sign:
            return torch.full_like(short, variation.sign > 0), torch.full_like(padded, variation.sign < 0)
        return _uniform(short, generator) > 0.5, _uniform(padded, generator) > 0.5
    if not (short.is_floating_point() or short.is_complex()):
        return _varied_integers(short, long, padded, variation, generator)
    sign, base = variation.sign, _wide(padded)
    far = WIDE.get(short.dtype, 1e12) if variation.entrywise else FAR
    noise, padded_noise = (_uniform(tensor, generator).add_(1).mul_(far) for tensor in (short, padded))
    ordinary = base.abs() < ORDINARY
    if sign:
        level = 0.0
        if fixed is not None and not variation.entrywise and bool((mask := fixed & ordinary).any()):
            level = float((base[mask] * sign).real.clamp(min=0).max())
        free = torch.where(ordinary, padded_noise.add_(base.abs()).mul_(-sign), base - sign * FAR)
        return noise.add_(level).mul_(sign).to(short.dtype), free.to(padded.dtype)
    anything = noise.mul_(2).sub_(3 * far).to(short.dtype) if variation.mixed else torch.zeros_like(short)
    near = torch.full_like(base, variation.literal) if variation.entrywise else base.abs() - padded_noise
    return anything, torch.where(ordinary, near, base - FAR).to(padded.dtype)


def _varied_integers(
    short: torch.Tensor, long: torch.Tensor, padded: torch.Tensor, variation: Variation, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    least, most = (int(extreme) for extreme in long.aminmax())
    if variation.indices and not variation.entrywise:  # an index at the long size may be out of range at the short one
        return _varied_indices(short, (least, most), padded, variation, generator)
    limits = torch.iinfo(short.dtype)
    if variation.entrywise and not variation.sign:
        number = min(max(int(variation.literal), limits.min), limits.max)
        return torch.zeros_like(short), torch.full_like(padded, number)
    if variation.entrywise:
        least, most = max(limits.min, -(10**6)), min(limits.max, 10**6)
    else:
        least, most = min(least, 0), max(most, 1)
    if variation.sign:
        ends = {-1: least, 1: most}
        return torch.full_like(short, ends[variation.sign]), torch.full_like(padded, ends[-variation.sign])
    return _drawn(short, least, most, generator), _drawn(padded, least, most, generator)


def _varied_indices(
    short: torch.Tensor, ends: tuple[int, int], padded: torch.Tensor, variation: Variation, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the call's elements within their range at the short size, and the padded ones within the range at the long size."""
    short_ends = tuple([int(extreme) for extreme in short.aminmax()]) if short.numel() else ends
    if variation.sign:
        higher = variation.sign > 0
        return torch.full_like(short, short_ends[higher]), torch.full_like(padded, ends[not higher])
    return _drawn(short, short_ends[0], short_ends[1], generator), _drawn(padded, ends[0], ends[1], generator)


def _drawn(like: torch.Tensor, least: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """Draws integers from `least` to `most`."""
    drawn = (_uniform(like, generator).to(torch.float64) * (most - least + 1)).floor() + least
    return drawn.to(torch.int64).clamp(least, most).to(like.dtype)


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.numel() <= DRAWN:
        return torch.rand(like.shape, generator=generator, device=like.device)
    drawn = torch.rand(DRAWN, generator=generator, device=like.device)
    return drawn.repeat(like.numel() // DRAWN + 1)[: like.numel()].view(like.shape)
