"""Where tensors lie: their strides, how many bytes they span, and whether two of them share any, or one lies in others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from .schema import DTYPES, HOST, Value, Weight


def span(row: Value | Weight) -> int:
    return span_of(row.dtype, row.shape, row.strides)


def span_of(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from a tensor's first element to the end of its last; `strides` in elements."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * DTYPES[dtype]


def dense(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides in elements of a tensor without gaps whose axes lie in memory in `order`, outermost first (default: row-major)."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int], order: Sequence[int] | None = None) -> bool:
    """Whether `strides` are those of `dense`, where they matter (an axis of size 1 may have any)."""
    if 0 in shape:
        return True
    return all(size == 1 or have == want for size, have, want in zip(shape, strides, dense(shape, order), strict=True))


def moving(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that matter: none of an axis of one element, nor of a tensor without any."""
    return [] if 0 in shape else [stride for size, stride in zip(shape, strides, strict=True) if size != 1]


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory: as they are for a row-major tensor, else by descending stride."""
    axes = range(len(shape))
    return tuple(axes) if is_dense(shape, strides) else tuple(sorted(axes, key=lambda axis: (-strides[axis], axis)))


def layout(row: Value) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What two values have in common whose bytes mean the same: dtype, shape, and the strides of axes longer than 1."""
    axes = zip(row.shape, row.strides, strict=True)
    return row.dtype, row.shape, () if 0 in row.shape else tuple([stride for size, stride in axes if size != 1])


class Spans:
    """Pieces of memories, asked whether one of them overlaps another piece.  `rows` are (memory, begin, end, number) in bytes,
    empty ones overlap nothing.  Takes time in proportion to the rows, and to their logarithm for a question."""

    __slots__ = ("_begins", "_furthest")

    def __init__(self, rows: Iterable[tuple[str, int, int, int]]) -> None:
        self._begins: dict[str, list[int]] = {}
        self._furthest: dict[str, list[tuple[int, int]]] = {}  # (end, number) of the piece that ends last among those so far
        for memory, begin, end, number in sorted(row for row in rows if row[1] < row[2]):
            known = self._furthest.setdefault(memory, [])
            known.append(max(known[-1], (end, number)) if known else (end, number))
            self._begins.setdefault(memory, []).append(begin)

    @classmethod
    def of(cls, values: Sequence[Value], chosen: Iterable[int]) -> Spans:
        """Those of some of a program's values, by their positions."""
        return cls((values[index].memory, *extent(values[index]), index) for index in chosen)

    def over(self, memory: str, begin: int, end: int) -> int | None:
        """The number of a row that shares a byte with this piece; None where there is none."""
        behind = bisect_left(self._begins.get(memory, ()), end)
        if begin < end and behind and self._furthest[memory][behind - 1][0] > begin:
            return self._furthest[memory][behind - 1][1]
        return None


class Cover:
    """Pieces of memories, asked whether they hold all of another piece.  `rows` are (memory, begin, end) in bytes; pieces without a
    gap between them are one."""

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
        """Whether every byte of this piece, which is not empty, lies in the rows."""
        at = bisect_right(self._begins.get(memory, ()), begin) - 1
        return at >= 0 and end <= self._ends[memory][at]


def extent(value: Value) -> tuple[int, int]:
    """The first byte of a value in its memory, and the one behind its last."""
    return value.offset, value.offset + span(value)


def graph_memories(memories: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Of a manifest's memories, those that recordings may refer to: none does to the host's."""
    return {name: size for name, size in memories if name != HOST}
