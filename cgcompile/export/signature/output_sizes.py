"""Finds an expression in the declared dimensions for the size of an output's axis, from its sizes in eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement

from cgbundle.format import limits
from cgbundle.format.schema import Size
from cgbundle.format.shapes import evaluate, operands

Points = Sequence[tuple[Mapping[str, int], int]]
"""(sizes of the declared dimensions, size of the axis at these sizes)."""

DIVISORS, SHIFTS = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64), range(-64, 65)
"""Divisors and added constants of quotients that `fitted` tries, as from strides, pooling and patches."""


def fitted(points: Points) -> Size | None:
    """Returns the simplest expression that is right at all points, or None.  Tries a number; then sums of multiples of dimensions,
    and of their products; then a dimension plus a constant, divided and rounded down."""
    for size in _candidates(points):
        if size is not None and all(evaluate(size, sizes) == value for sizes, value in points):
            return size
    return None


def tabled(points: Points) -> Size | None:
    """Returns an expression that lists the value at each point and is 0 elsewhere, or None for too many points.

    1 // (1 + (d - k) * (d - k)) is 1 for d = k and 0 for any other d.
    """
    expression: Size = 0
    for sizes, value in points:
        term: Size = value
        for name, size in sizes.items():
            distance = ("-", name, size)
            term = ("*", term, ("//", 1, ("+", 1, ("*", distance, distance))))
        expression = ("+", expression, term) if expression else term
    return expression if operands(expression) <= limits.SIZE_OPERATORS else None


def _candidates(points: Points) -> Iterator[Size | None]:
    names = list(points[0][0])
    yield points[0][1]
    for name in names:
        yield _sum(points, [(name,)])
    yield _sum(points, [(name,) for name in names])
    products: list[tuple[str, ...]] = [tuple(pair) for pair in combinations_with_replacement(names, 2)]
    for product in products:
        yield _sum(points, [product])
    yield _sum(points, [*[(name,) for name in names], *products])
    for exact in (True, False):  # prefer divisions without remainder at all points
        for name in names:
            for divisor in DIVISORS:
                for shift in sorted(SHIFTS, key=abs):
                    if exact == all((sizes[name] + shift) % divisor == 0 for sizes, _ in points):
                        base: Size = ("//", _plus(name, shift), divisor)
                        yield _plus(base, points[0][1] - evaluate(base, points[0][0]))


def _plus(size: Size, number: int) -> Size:
    return size if not number else ("+", size, number) if number > 0 else ("-", size, -number)


def _sum(points: Points, terms: Sequence[tuple[str, ...]]) -> Size | None:
    """Returns an integer plus integer multiples of the terms (products of dimensions), or None unless there is one solution."""
    rows = [[Fraction(1), *[_product(sizes, term) for term in terms], Fraction(value)] for sizes, value in points]
    factors = _solved(rows, 1 + len(terms))
    if factors is None or any(factor.denominator != 1 for factor in factors):
        return None
    size: Size | None = None
    for factor, term in sorted(zip(map(int, factors[1:]), terms, strict=True), key=lambda pair: pair[0] < 0):
        if not factor:
            continue
        product: Size = term[0]
        for name in term[1:]:
            product = ("*", product, name)
        product = product if abs(factor) == 1 else ("*", product, abs(factor))
        size = (product if factor > 0 else ("-", 0, product)) if size is None else ("+" if factor > 0 else "-", size, product)
    return int(factors[0]) if size is None else _plus(size, int(factors[0]))


def _product(sizes: Mapping[str, int], term: Sequence[str]) -> Fraction:
    product = Fraction(1)
    for name in term:
        product *= sizes[name]
    return product


def _solved(rows: list[list[Fraction]], unknown: int) -> list[Fraction] | None:
    """Solves linear equations by Gaussian elimination; None unless there is exactly one solution."""
    for column in range(unknown):
        pivot = next((row for row in rows[column:] if row[column]), None)
        if pivot is None:
            return None
        rows.remove(pivot)
        rows.insert(column, pivot)
        scale = pivot[column]
        pivot[:] = [value / scale for value in pivot]
        for row in rows:
            if row is not pivot and row[column]:
                factor = row[column]
                row[:] = [value - factor * other for value, other in zip(row, pivot, strict=True)]
    return [row[unknown] for row in rows[:unknown]] if not any(row[unknown] for row in rows[unknown:]) else None
