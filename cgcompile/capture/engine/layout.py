"""Lays out an engine's named tensors in memory `inputs` of a bundle.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cgbundle.format.shapes import span_of

from ...targets.memory_layout import ALIGN, PAD, align
from ..take import Range
from .engine_take import NamedTensor

if TYPE_CHECKING:
    from ...targets.cuda.tensors import TensorPlace


def lay_out_tensors(places: Mapping[str, TensorPlace]) -> tuple[list[Range], tuple[NamedTensor, ...]]:
    """Returns the spans of memory that hold the tensors, and the tensors' rows.  Tensors that overlap share a span.  Spans have
    gaps between them.  They are ordered by their alphabetically first tensor, so that two processes get the same order."""
    ends = {name: place.address + span_of(place.dtype, place.shape, place.strides) for name, place in places.items()}
    groups: list[list[str]] = []
    furthest = 0
    for name in sorted(places, key=lambda name: (places[name].address, name)):
        if not groups or places[name].address >= furthest:
            groups.append([])
        groups[-1].append(name)
        furthest = max(furthest if groups[-1][1:] else 0, ends[name])
    spans: list[Range] = []
    rows: list[NamedTensor] = []
    end = 0
    for number, group in enumerate(sorted(groups, key=min)):
        start = min(places[name].address for name in group)
        size = max(ends[name] for name in group) - start
        spans.append(Range(kind="inputs", start=start, size=size, offset=end))
        end = align(end + size + 1)
        for name in sorted(group):
            place = places[name]
            rows.append(
                NamedTensor(
                    name=name, dtype=place.dtype, shape=place.shape, strides=place.strides, span=number,
                    offset=place.address - start,
                )
            )  # fmt: skip
    return spans, tuple(rows)


def inputs_bytes(spans: Sequence[Range]) -> int:
    """Returns the size in bytes of memory `inputs`, which holds `spans`."""
    return max([align(memory_range.offset + memory_range.size + 1) for memory_range in spans], default=0) + PAD


def alignment(*addresses: int) -> int:
    """Returns the largest power of two, at most ALIGN, that divides all addresses."""
    return min([ALIGN, *[address & -address for address in addresses]])


def without(begin: int, end: int, taken: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the parts of [begin, end) outside the intervals `taken`, which are sorted and disjoint."""
    for first, last in taken:
        if last <= begin:
            continue
        if first >= end:
            break
        if begin < first:
            yield begin, first
        begin = last
    if begin < end:
        yield begin, end
