"""Strides of tensors, the bytes they span, and whether spans overlap or cover each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from .schema import DTYPES, HOST, Value, Weight


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
