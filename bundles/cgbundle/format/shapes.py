"""Shapes of tensors: sizes as functions of the declared dimensions, strides, the bytes that strides span, and whether spans overlap
or cover each other. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add, floordiv, mod, mul, sub

from .schema import DTYPES, HOST, Size, Sizes, Value, Weight

# --- sizes ------------------------------------------------------------------------------------------------------------

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


# --- strides and spans ----------------------------------------------------------------------------------------------------


def span(row: Value | Weight) -> int:
    return span_of(row.dtype, row.shape, row.strides)


def span_of(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from the first element to the end of the last; `strides` in elements."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * DTYPES[dtype]


def dense(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides in elements of a tensor without gaps, its axes in memory in `order`, outermost first (default: row-major)."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int], order: Sequence[int] | None = None) -> bool:
    """Whether `strides` equal those of `dense`; those of axes of size 1 do not matter."""
    if 0 in shape:
        return True
    return all(size == 1 or have == want for size, have, want in zip(shape, strides, dense(shape, order), strict=True))


def moving(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides of axes longer than 1; [] for an empty tensor."""
    return [] if 0 in shape else [stride for size, stride in zip(shape, strides, strict=True) if size != 1]


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory."""
    axes = range(len(shape))
    return tuple(axes) if is_dense(shape, strides) else tuple(sorted(axes, key=lambda axis: (-strides[axis], axis)))


def layout(row: Value) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Equal for two values whose bytes have the same meaning: dtype, shape, and strides of axes longer than 1."""
    return row.dtype, row.shape, tuple(moving(row.shape, row.strides))


class Spans:
    """Finds an overlap in logarithmic time. `rows`: (memory, begin, end, number) in bytes; empty ones overlap nothing."""

    __slots__ = ("_begins", "_furthest")

    def __init__(self, rows: Iterable[tuple[str, int, int, int]]) -> None:
        self._begins: dict[str, list[int]] = {}
        self._furthest: dict[str, list[tuple[int, int]]] = {}  # (end, number) of the row that ends last, up to this row
        for memory, begin, end, number in sorted(row for row in rows if row[1] < row[2]):
            known = self._furthest.setdefault(memory, [])
            known.append(max(known[-1], (end, number)) if known else (end, number))
            self._begins.setdefault(memory, []).append(begin)

    @classmethod
    def of(cls, values: Sequence[Value], chosen: Iterable[int]) -> Spans:
        return cls((values[index].memory, *extent(values[index]), index) for index in chosen)

    def over(self, memory: str, begin: int, end: int) -> int | None:
        """The number of a row that overlaps these bytes, or None."""
        count = bisect_left(self._begins.get(memory, ()), end)
        if begin < end and count and self._furthest[memory][count - 1][0] > begin:
            return self._furthest[memory][count - 1][1]
        return None


class Cover:
    """Whether ranges cover other ranges. `rows`: (memory, begin, end) in bytes; adjacent ones are merged."""

    __slots__ = ("_begins", "_ends")

    def __init__(self, rows: Iterable[tuple[str, int, int]]) -> None:
        self._begins: dict[str, list[int]] = {}
        self._ends: dict[str, list[int]] = {}
        for memory, begin, end in sorted(rows):
            begins, ends = self._begins.setdefault(memory, []), self._ends.setdefault(memory, [])
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)

    def holds(self, memory: str, begin: int, end: int) -> bool:
        """Whether the rows cover every byte of this range, which is not empty."""
        at = bisect_right(self._begins.get(memory, ()), begin) - 1
        return at >= 0 and end <= self._ends[memory][at]


def extent(value: Value) -> tuple[int, int]:
    """The first byte of a value in its memory, and the end."""
    return value.offset, value.offset + span(value)


def graph_memories(memories: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The memories that recordings may refer to: all but the host's."""
    return {name: size for name, size in memories if name != HOST}
