"""Size expressions: shapes as functions of the declared dimensions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add, floordiv, mod, mul, sub

from .schema import Size, Sizes

OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "//": floordiv, "%": mod}


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """The value of `size` for `values` of the dimensions. Raises KeyError for an unknown dimension."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return values[size]
    operator, left, right = size
    return OPERATORS[operator](evaluate(left, values), evaluate(right, values))


def operands(size: Size) -> int:
    """The number of integers, names and operators in `size`."""
    return 1 + operands(size[1]) + operands(size[2]) if isinstance(size, tuple) else 1


def names(size: Size) -> frozenset[str]:
    """The dimensions in `size`."""
    if isinstance(size, int):
        return frozenset()
    if isinstance(size, str):
        return frozenset((size,))
    return names(size[1]) | names(size[2])


def linear(size: Size) -> tuple[str, int, int] | None:
    """(dimension, scale, offset) if `size` is scale * dimension + offset with scale > 0, else None. Every
    size of an input that varies has this form."""
    if isinstance(size, str):
        return (size, 1, 0)
    if isinstance(size, int):
        return None
    operator, left, right = size
    if operator in ("+", "*") and isinstance(left, int):
        left, right = right, left
    if operator in ("+", "-") and isinstance(right, int):
        inner = linear(left)
        return inner and (inner[0], inner[1], inner[2] + (right if operator == "+" else -right))
    if operator == "*" and isinstance(right, int) and right > 0:
        inner = linear(left)
        return inner and (inner[0], inner[1] * right, inner[2] * right)
    return None


def axes_text(dimension: str, shapes: Sequence[tuple[str, Sizes]]) -> str:
    """Describes which axes of named tensors depend on a dimension: `axis 0 of ids, mask, axis 1 of y (2*batch)`."""
    axes: dict[str, list[str]] = {}
    for name, shape in shapes:
        for axis, size in enumerate(shape):
            if dimension in names(size):
                axes.setdefault(f"axis {axis}", []).append(name if size == dimension else f"{name} ({text(size)})")
    return ", ".join([f"{axis} of {', '.join(tensors)}" for axis, tensors in axes.items()])


def text(size: Size) -> str:
    """`size` in infix notation: `2*batch+1`."""
    if isinstance(size, tuple):
        operator: str = size[0]
        sides = [text(side) for side in size[1:]]
        for index, side in enumerate(size[1:]):
            if isinstance(side, tuple) and (operator in ("*", "//", "%") or (operator == "-" and index == 1)):
                sides[index] = f"({sides[index]})"
        if operator == "*" and isinstance(size[2], int):
            sides.reverse()
        return operator.join(sides)
    return str(size)
