"""How far what a replay gives is from what is expected: the rule of FORMAT.md, as code over bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

from ..format.schema import DTYPES
from .numbers import decode
from .self_test_tensors import is_exact

BLOCK = 1 << 16
"""Bytes that are decoded at a time, a multiple of every element: a cache of 0.5 GB as Python's numbers would take 16."""


def difference(dtype: str, expected: bytes, got: bytes) -> float:
    """How far `got` is from `expected`, both row-major.

    Integers and booleans: the share of elements that differ, from 0 to 1.  Others: the largest |got - expected| divided by the
    largest finite |expected|; complex numbers count as their two parts.  Infinite where one is NaN or infinite and the other is
    not the same, and for other lengths.
    """
    if len(expected) != len(got):
        return inf
    if is_exact(dtype):
        differ = sum([x != y for _, wanted, actual in _blocks(dtype, expected, got) for x, y in zip(wanted, actual, strict=True)])
        return float(differ * DTYPES[dtype] / max(1, len(expected)))
    largest, furthest = 0.0, 0.0
    for _, wanted, actual in _blocks(dtype, expected, got, alike=True):
        largest = max(largest, max((abs(x) for x in wanted if x - x == 0), default=0.0))
        if wanted is not actual:
            furthest = max(furthest, max(map(_apart, wanted, actual), default=0.0))
    return furthest / (largest or 1.0)


def describe(dtype: str, shape: Sequence[int], expected: bytes, got: bytes) -> str:
    """What differs, for people: `3 of 8 values differ, first at [2]: 17, expected 12`; of floats the place that is furthest off."""
    if len(expected) != len(got):
        return f"{len(got)} bytes, expected {len(expected)}"
    parts = 2 if dtype.startswith("complex") else 1
    total, count = len(expected) * parts // DTYPES[dtype], 0
    worst: tuple[float, int, object, object] = (0.0, 0, None, None)
    for first, wanted, actual in _blocks(dtype, expected, got):
        for place, (x, y) in enumerate(zip(wanted, actual, strict=True), first):
            if x == y or (x != x and y != y):
                continue
            count += 1
            distance = inf if is_exact(dtype) else _apart(x, y)  # the first of the furthest
            if distance > worst[0]:
                worst = distance, place, x, y
    if not count:
        return "equal values, other bits"
    which = "first" if is_exact(dtype) else "furthest off"
    counted = f"{count} of {total} {'parts' if parts == 2 else 'values'} differ"
    _, place, x, y = worst
    where = f" at {_axes(place // parts, shape)}" if shape else ""
    return f"{counted}, {which}{where}: {_number(y)}, expected {_number(x)}"


def _blocks(dtype: str, expected: bytes, got: bytes, *, alike: bool = False) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """The number of its first element, and the numbers of both, of every block that differs; with `alike` of the others, too, but
    for zeros, and the same list twice."""
    parts = 2 if dtype.startswith("complex") else 1
    zeros = bytes(BLOCK)
    for begin in range(0, len(expected), BLOCK):
        one, other = expected[begin : begin + BLOCK], got[begin : begin + BLOCK]
        first = begin * parts // DTYPES[dtype]
        if one != other:
            yield first, decode(dtype, one), decode(dtype, other)
        elif alike and one != zeros[: len(one)]:
            numbers = decode(dtype, one)
            yield first, numbers, numbers


def nearest(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Of (error, bound) the pair that came nearest to its bound, or went furthest beyond; (0, 0) without any."""
    return max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else (inf if pair[0] else -1.0), default=(0.0, 0.0))


def _apart(x: float, y: float) -> float:
    """The distance of two numbers; infinite where it is no number."""
    if x == y or (x != x and y != y):
        return 0.0
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
