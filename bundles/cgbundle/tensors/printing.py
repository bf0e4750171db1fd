"""The values of a tensor as text of one line: all of few, the edges of many.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

Number = bool | int | float | complex

FEW = 16
"""So many are shown all."""

EDGES = ((3, 3), (1, 1), (1, 0))
"""Of more: how many are shown at both ends of the last axis, of the one before it, and of the others."""


def values(shape: Sequence[int], strides: Sequence[int], read: Callable[[int], Number]) -> str:
    """`[[1, 2, 3, ..., 8, 9, 0], ..., [1, 2, 3, ..., 8, 9, 0]]`, floats with six digits.  `read` gives the element that lies so
    many elements behind the first."""
    edges = EDGES if prod([max(1, size) for size in shape]) > FEW else ()

    def along(axis: int, at: int) -> str:
        if axis == len(shape):
            return _number(read(at))
        size = shape[axis]
        first, last = edges[min(len(shape) - 1 - axis, 2)] if edges else (size, 0)
        if size <= first + last:
            first, last = size, 0
        begin, end = [
            [along(axis + 1, at + index * strides[axis]) for index in part] for part in (range(first), range(size - last, size))
        ]
        return f"[{', '.join([*begin, *['...'] * (size > first + last), *end])}]"

    return along(0, 0)


def _number(value: Number) -> str:
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)
