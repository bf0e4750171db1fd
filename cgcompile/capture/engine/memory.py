"""The memory that an engine's graphs can use in this process: named tensors, private pools of the captures, and torch's other
blocks.  Private torch interface: the keys of `torch.cuda.memory_snapshot` (2.11, 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgbundle.format.limits import NAME

from ...errors import BuildError
from ...targets.cuda.tensors import TensorPlace, device_bytes
from ...targets.weights import stored_dtype
from ..take import Range, Word
from ..worker.address_map import AddressMap
from .engine_take import NamedTensor, PointerWord
from .layout import lay_out_tensors, without

SCAN_WORDS = 1 << 26
"""Maximum number of 8-byte words in one step of the search for addresses."""

MAX_POINTERS = 1 << 16
"""Maximum number of address words that are returned for one range.  They are enough to detect a table of addresses."""

Pool = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """`ranges`: the spans of `tensors`, then segments of the graphs' private pools, then torch's other live blocks.  `segments`:
    all segments of torch's allocator, as (address, bytes).  `pooled`: by name, the tensors in private pools."""

    ranges: tuple[Range, ...]
    segments: tuple[tuple[int, int], ...]
    tensors: tuple[NamedTensor, ...]
    pooled: Mapping[str, TensorPlace]


def engine_memory(tensors: Mapping[str, torch.Tensor], pools: Iterable[Pool]) -> EngineMemory:
    """Finds the memory on the current device.  Raises tensor-refused, dtype-unsupported."""
    graph_pools = {tuple(pool) for pool in pools}
    snapshot = [row for row in torch.cuda.memory_snapshot() if row["device"] == torch.cuda.current_device()]
    private, others = [
        [row for row in snapshot if (tuple(row["segment_pool_id"]) in graph_pools) is member] for member in (True, False)
    ]
    places = {name: _place(name, tensors[name]) for name in sorted(tensors)}
    places = {name: place for name, place in places.items() if 0 not in place.shape}
    pooled = {name: place for name, place in places.items() if _inside(place.address, private)}
    named = {name: place for name, place in places.items() if name not in pooled}
    spans, rows = lay_out_tensors(named)
    ranges = [
        *spans,
        *[Range(kind="pool", start=row["address"], size=row["total_size"]) for row in private],
        *_others(others, spans),
    ]
    segments = [(row["address"], row["total_size"]) for row in snapshot]
    return EngineMemory(ranges=tuple(ranges), segments=tuple(segments), tensors=rows, pooled=pooled)


def _place(name: str, tensor: Any) -> TensorPlace:
    if len(name) > NAME or not name.isprintable():
        raise _refused(name[:40], f"has a name that is not printable, or longer than {NAME} characters")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or tensor.layout is not torch.strided:
        raise _refused(name, "is not a dense torch tensor on a GPU")
    if tensor.get_device() != torch.cuda.current_device():
        raise _refused(name, f"lies on GPU {tensor.get_device()}, and the current device is {torch.cuda.current_device()}")
    return TensorPlace(
        address=tensor.data_ptr(),
        dtype=stored_dtype(tensor, f"tensor {name!r}"),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
    )


def _refused(name: str, why: str) -> BuildError:
    return BuildError("tensor-refused", f"tensor {name!r} {why}")


def _inside(address: int, segments: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["address"] <= address < row["address"] + row["total_size"] for row in segments)


def _others(segments: Sequence[Mapping[str, Any]], spans: Sequence[Range]) -> Iterator[Range]:
    """Yields torch's live blocks without the parts that named tensors cover.  A block ends at its requested size: the padding
    behind it is unused."""
    named_intervals = sorted((memory_range.start, memory_range.start + memory_range.size) for memory_range in spans)
    for segment in segments:
        start = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                for begin, end in without(start, start + block.get("requested_size", block["size"]), named_intervals):
                    yield Range(kind="torch", start=begin, size=end - begin)
            start += block["size"]


def pointer_words(addresses: AddressMap, ranges: Iterable[int], segments: Sequence[tuple[int, int]]) -> tuple[PointerWord, ...]:
    """Returns every aligned word of these ranges whose value is an address inside a known range or one of torch's segments."""
    areas = [*segments, *[(memory_range.start, memory_range.size) for memory_range in addresses.ranges]]
    low, high = min(start for start, _ in areas), max(start + size for start, size in areas)
    pointers: list[PointerWord] = []
    for number in list(ranges):
        memory_range = addresses.ranges[number]
        for at, value in _words_between(memory_range.start, memory_range.size, low, high):
            readings = addresses.readings(value, None)
            if readings:
                pointers.append(PointerWord(range=number, word=Word(at=at, readings=readings)))
    return tuple(pointers)


def _words_between(start: int, size: int, low: int, high: int) -> list[tuple[int, int]]:
    """Returns (offset, value) of the aligned words of memory with low <= value < high; at most MAX_POINTERS of them."""
    first = start + -start % 8
    count = (start + size - first) // 8
    pairs: list[tuple[int, int]] = []
    for begin in range(0, count, SCAN_WORDS):
        words = device_bytes(first + 8 * begin, 8 * min(SCAN_WORDS, count - begin)).view(torch.int64)
        places = ((words >= low) & (words < high)).nonzero().reshape(-1)[: MAX_POINTERS - len(pairs)]
        values = words[places]
        pairs += [(first - start + 8 * (begin + at), value) for at, value in zip(places.tolist(), values.tolist(), strict=True)]
    return pairs
