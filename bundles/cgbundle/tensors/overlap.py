"""Whether tensors share memory: what has to be known before one of them is written to.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Reach(NamedTuple):
    """Where the elements of a tensor lie: its first byte and the one behind its last, and the bytes of an element.  `axes`:
    (length, bytes from one element to the next) of those longer than 1."""

    start: int
    end: int
    item: int
    axes: tuple[tuple[int, int], ...]


def reach(address: int, shape: Sequence[int], strides: Sequence[int], item: int) -> Reach:
    """The reach of a tensor with `strides` in bytes, which may be negative; `item` are the bytes of an element."""
    if 0 in shape:
        return Reach(address, address, item, ())
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    start = address + sum((size - 1) * step for size, step in axes if step < 0)
    axes = [(size, abs(step)) for size, step in axes]
    return Reach(start, start + _span(axes, item), item, tuple(axes))


def folds(tensor: Reach) -> bool:
    """Whether elements of one tensor may share memory, as those of an expanded one do."""
    covered = tensor.item
    for size, step in sorted(tensor.axes, key=lambda axis: axis[1]):
        if step < covered:
            return True
        covered += (size - 1) * step
    return False


def apart(one: Reach, other: Reach) -> bool:
    """Whether two tensors are sure to share no byte: they lie one behind the other, or in columns of one table."""
    if one.end <= other.start or other.end <= one.start:
        return True
    for row in {step for _, step in (*one.axes, *other.axes)} - {0}:
        between = (other.start - one.start) % row
        if between >= _width(one, row) and between + _width(other, row) <= row:
            return True
    return False


def shared(tensors: Sequence[Reach], written: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(a tensor that is written to, another) by position, for every such pair that may share memory."""
    marked, end = set(written), 0
    order = sorted([index for index, each in enumerate(tensors) if each.end > each.start], key=lambda index: tensors[index].start)
    for place, index in enumerate(order):
        if tensors[index].start < end:
            for earlier in order[:place]:
                if (index in marked or earlier in marked) and not apart(tensors[earlier], tensors[index]):
                    yield (index, earlier) if index in marked else (earlier, index)
        end = max(end, tensors[index].end)


def _width(tensor: Reach, row: int) -> int:
    """Bytes that a tensor takes of a row: of the axes that do not lead from row to row."""
    return _span([(size, step) for size, step in tensor.axes if step % row], tensor.item)


def _span(axes: Sequence[tuple[int, int]], item: int) -> int:
    return sum((size - 1) * step for size, step in axes) + item
