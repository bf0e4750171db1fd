"""Represents blocks of integers and addresses as sums of smaller arrays, such as a column and a row for `row[:, None] * 768 +
column[None, :]`.  Most addresses in a kernel are such sums.  Their elements are computed only when an operation other than an
addition or a load needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .values import Array, Handle

WORTH = 4
"""The minimum ratio of a block's elements to the elements of its terms.  Below it, the block is computed at once."""


class Sum(Handle):
    """A handle whose elements are the sum of `terms`, broadcast to `shape`; integers wrap.  No term broadcasts to another's
    shape."""

    __slots__ = ("shape", "terms")

    def __init__(self, terms: tuple[Array, ...], shape: tuple[int, ...], dtype: Any) -> None:
        super().__init__(None, dtype)
        self.terms = terms
        self.shape = shape

    @property
    def data(self) -> Array:
        if self._data is None:
            first, *others = self.terms
            total = np.broadcast_to(first, self.shape)
            for term in others:
                total = total + term
            self._data = total
        return self._data

    def bounds(self) -> tuple[int, int]:
        """A lower and an upper bound of the elements, valid if no element wraps."""
        return sum(int(term.min()) for term in self.terms), sum(int(term.max()) for term in self.terms)

    def scaled(self, size: int) -> tuple[Array, ...] | None:
        """The terms times `size`, as int64, or None if an element may wrap, because the scaled terms would then be wrong."""
        low, high = self.bounds()
        limits = np.iinfo(self.terms[0].dtype)
        if low < limits.min or high > limits.max:
            return None
        return tuple([term.astype(np.int64) * size for term in self.terms])


def compact(data: Array) -> Array:
    """The array with length 1 along axes that only repeat elements."""
    if 0 not in data.strides:
        return data
    return data[tuple([slice(0, 1) if not stride else slice(None) for stride in data.strides])]


def terms_of(item: Handle) -> tuple[Array, ...]:
    """Arrays whose sum is the handle's elements."""
    return item.terms if isinstance(item, Sum) else (compact(item.data),)


def shape_of(item: Handle) -> tuple[int, ...]:
    """The shape of a handle's elements, without computing them."""
    return item.shape if isinstance(item, Sum) else item.data.shape


def summed(terms: Sequence[Array], shape: tuple[int, ...], dtype: Any) -> Sum | None:
    """The sum of arrays of one dtype, or None if a `Sum` would save too little (`WORTH`)."""
    merged: list[Array] = []
    for term in sorted(terms, key=np.size, reverse=True):
        including = [place for place, other in enumerate(merged) if _includes(other.shape, term.shape)]
        if including:  # the last one is the smallest
            merged[including[-1]] = merged[including[-1]] + term
        else:
            merged.append(term)
    if sum(term.size for term in merged) * WORTH > math.prod(shape):
        return None
    return Sum(tuple(merged), shape, dtype)


def _includes(outer: tuple[int, ...], inner: tuple[int, ...]) -> bool:
    return len(outer) == len(inner) and all(one == other or other == 1 for one, other in zip(outer, inner, strict=True))


def lines(pointers: Sum, size: int) -> tuple[int, Array, int] | None:
    """Finds an axis along which the elements are contiguous at aligned addresses.  Returns (axis, first address of every line,
    elements per line), or None if the terms do not show it."""
    for place, term in enumerate(pointers.terms):
        axes = [axis for axis, length in enumerate(term.shape) if length > 1]
        if len(axes) != 1 or not axes[0]:
            continue
        (axis,) = axes
        others = [other for number, other in enumerate(pointers.terms) if number != place]
        steps = term.reshape(-1)
        if any(other.shape[axis] > 1 for other in others) or not (np.diff(steps) == size).all():
            continue
        begins: Array = np.full((1,) * term.ndim, steps[0])
        for other in others:
            begins = begins + other
        if np.bitwise_or.reduce(begins, axis=None) & (size - 1):
            return None
        return axis, begins, len(steps)
    return None
