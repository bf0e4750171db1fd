"""Where tensors lie: how many bytes they span, and whether two of them share any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .schema import DTYPES, Value, Weight

HOST_ONLY = -1
"""`Weight.offset` of a weight that host regions alone read, in the mapped file: it is not put on the GPU."""


def span(row: Value | Weight) -> int:
    return span_of(row.dtype, row.shape, row.strides)


def span_of(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from a tensor's first element to the end of its last; `strides` in elements."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * DTYPES[dtype]


def overlap(one: Value, other: Value) -> bool:
    """Whether the spans of two values of a GPU's bundle share a byte."""
    if one.memory != other.memory or not (own := span(one)) or not (others := span(other)):
        return False
    return one.offset < other.offset + others and other.offset < one.offset + own


def graph_memories(memories: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Of a manifest's memories, those that recordings may refer to: none does to the host's."""
    return {name: size for name, size in memories if name != "host"}
