"""How far what a replay gives is from what is expected.  FORMAT.md states the rule, under "Exam"; this is its code over bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from .exam_tensors import is_exact
from .tensor import decode


def difference(dtype: str, expected: bytes, got: bytes) -> float:
    """How far `got` is from `expected`, both row-major.

    Integers and booleans: the share of elements that differ, from 0 to 1.  Others: the largest |got - expected| divided by the
    largest finite |expected|; complex numbers count as their two parts.  Infinite where one is NaN or infinite and the other is
    not the same, and for other lengths.
    """
    if len(expected) != len(got):
        return inf
    wanted, found = decode(dtype, expected), decode(dtype, got)
    if is_exact(dtype):
        differ = sum([x != y for x, y in zip(wanted, found, strict=True)])
        return float(differ / max(1, len(wanted)))
    largest = max((abs(x) for x in wanted if x - x == 0), default=0) or 1
    worst: float = 0.0
    for x, y in zip(wanted, found, strict=True):
        if x == y or (x != x and y != y):
            continue
        distance = abs(x - y)
        if not distance < inf:
            return inf
        worst = max(worst, float(distance / largest))
    return worst


def describe(dtype: str, shape: Sequence[int], expected: bytes, got: bytes) -> str:
    """What differs, for people: `3 of 8 values differ, first at [2]: 17, expected 12`; of floats the place that is furthest off."""
    if len(expected) != len(got):
        return f"{len(got)} bytes, expected {len(expected)}"
    wanted, found = decode(dtype, expected), decode(dtype, got)
    parts = 2 if dtype.startswith("complex") else 1
    pairs = list(zip(wanted, found, strict=True))
    wrong = [index for index, (x, y) in enumerate(pairs) if x != y and (x == x or y == y)]
    if not wrong:
        return "equal values, other bits"
    if is_exact(dtype):
        place, which = wrong[0], "first"
    else:
        place, which = max(wrong, key=lambda index: _distance(*pairs[index])), "furthest off"
    counted = f"{len(wrong)} of {len(pairs)} {'parts' if parts == 2 else 'values'} differ"
    x, y = pairs[place]
    where = f" at {_axes(place // parts, shape)}" if shape else ""
    return f"{counted}, {which}{where}: {_number(y)}, expected {_number(x)}"


def nearest(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Of (error, bound) the pair that came nearest to its bound, or went furthest beyond; (0, 0) without any."""
    return max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else (inf if pair[0] else -1.0), default=(0.0, 0.0))


def _distance(x: float, y: float) -> float:
    distance = abs(x - y)
    return distance if distance == distance else inf


def _axes(index: int, shape: Sequence[int]) -> list[int]:
    """The place of element `index`, an index per axis."""
    place: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        place.append(at)
    return place[::-1]


def _number(value: object) -> str:
    return f"{value:.6g}" if type(value) is float else str(value)
