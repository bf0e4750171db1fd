"""The memory that the verification of an engine compares, poisons and restores: in chunks, whose digests the GPU computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cgbundle.format.schema import Engine
from cgbundle.format.shapes import span_of
from cgbundle.gpu.engine_replay import POISON, Place
from cgbundle.validate.engine import span_of_tensor

from ...errors import BuildError
from ...targets.cuda.tensors import device_bytes
from .digests import CHUNK, digests


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The addresses in this process of the engine's spans and, by name, of its tensors in private pools.  `pools`: address and
    bytes of all memory of these pools."""

    spans: tuple[int, ...]
    pooled: Mapping[str, int]
    pools: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Memory to compare: `size` bytes at `address`, which is `at` bytes after the start of tensor `name`.  `size` and `address` are
    multiples of 8.  `begin`: offset of these bytes in the file of contents.  `span`: whether it is in a span of the engine, not in
    a private pool."""

    name: str
    at: int
    address: int
    size: int
    begin: int
    span: bool

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.size // CHUNK)

    def chunk(self, number: int) -> tuple[int, int]:
        """Returns (offset in the region, bytes) of a chunk."""
        return CHUNK * number, min(CHUNK, self.size - CHUNK * number)

    def place(self, number: int) -> Place:
        """Returns a chunk as (tensor name, offset from the tensor's start, bytes), by which the fresh process finds it."""
        begin, size = self.chunk(number)
        return self.name, self.at + begin, size

    def memory(self, number: int) -> torch.Tensor:
        """Returns a chunk's memory as a uint8 tensor."""
        begin, size = self.chunk(number)
        return device_bytes(self.address + begin, size)


Chunk = tuple[Region, int]
"""A region and the number of one of its chunks."""


def compared_regions(engine: Engine, here: Here, *, pooled: bool) -> list[Region]:
    """Returns the engine's spans as regions.  With `pooled`, also the tensors in private pools; overlapping tensors form one
    region."""
    first_tensors = {span_of_tensor(engine, row): row for row in reversed(engine.tensors) if row.memory == "inputs"}
    rows = [
        (first_tensors[number].name, span.offset - first_tensors[number].offset, address, span.bytes, True)
        for number, (span, address) in enumerate(zip(engine.spans, here.spans, strict=True))
    ]
    arena_rows = [row for row in engine.tensors if pooled and row.memory == "arena"]
    merged: list[tuple[int, int, str]] = []
    for begin, end, name in sorted(
        (row.offset, row.offset + span_of(row.dtype, row.shape, row.strides), row.name) for row in arena_rows
    ):
        if merged and begin < merged[-1][1]:
            first_begin, last_end, first_name = merged.pop()
            begin, end, name = first_begin, max(end, last_end), first_name
        merged.append((begin, end, name))
    rows += [(name, 0, here.pooled[name], end - begin, False) for begin, end, name in merged]
    return as_regions(rows)


def returned_regions(engine: Engine, here: Here, names: Collection[str]) -> list[Region]:
    """Returns the tensors of these names that lie in private pools, one region for a tensor."""
    rows = [row for row in engine.tensors if row.memory == "arena" and row.name in names]
    sizes = [(row.name, span_of(row.dtype, row.shape, row.strides)) for row in rows]
    return as_regions([(name, 0, here.pooled[name], size, False) for name, size in sizes if size])


def as_regions(rows: Sequence[tuple[str, int, int, int, bool]]) -> list[Region]:
    """Returns a region for every (name, at, address, size, span), with 8-byte alignment."""
    regions: list[Region] = []
    total = 0
    for name, at, address, size, span in rows:
        misalignment = address % 8  # the bytes around it belong to the same allocation
        size = -(-(size + misalignment) // 8) * 8
        regions.append(Region(name=name, at=at - misalignment, address=address - misalignment, size=size, begin=total, span=span))
        total += size
    return regions


def span_handle(address: int, number: int, engine: Engine) -> tuple[str, int, int]:
    """Returns (IPC handle of the span's allocation as hex, offset in it, address).  Raises not-verifiable."""
    from ..worker.driver import allocation, driver, succeeded

    block = allocation(address)
    result = driver.cuIpcGetMemHandle(driver.CUdeviceptr(block[0])) if block is not None else None
    if block is None or result is None or not succeeded(result):
        row = next(row for row in engine.tensors if row.memory == "inputs" and span_of_tensor(engine, row) == number)
        text = f"tensor {row.name!r} lies in memory that no other process can open"
        raise BuildError(
            "not-verifiable", text, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, and tensors of torch's on the GPU"
        )
    return bytes(result[1].reserved).hex(), address - block[0], address


def save_contents(regions: Sequence[Region], before: Sequence[Sequence[int]], contents: Path) -> None:
    """Writes the regions' contents to a file.  Chunks of zeros (digest 0) become holes in the file."""
    with open(contents, "wb") as file:
        for region, row in zip(regions, before, strict=True):
            for number, digest in enumerate(row):
                if digest:
                    file.seek(region.begin + CHUNK * number)
                    file.write(memoryview(region.memory(number).cpu().numpy()))
        file.truncate(sum(region.size for region in regions))


def region_digests(regions: Sequence[Region]) -> list[list[int]]:
    """Returns the digests of every chunk, by region."""
    torch.cuda.synchronize()
    return [digests(region.address, region.size).tolist() for region in regions]


def changed_chunks(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], without: Collection[tuple[int, int]] = ()
) -> dict[int, list[int]]:
    """Returns {region index: indices of chunks whose digests differ}, without regions that are equal.  `without`: (region index,
    index of a chunk) that are left out."""
    rows = {
        position: [number for number in differing_positions(one, two) if (position, number) not in without]
        for position, (one, two) in enumerate(zip(before, after, strict=True))
    }
    return {position: numbers for position, numbers in rows.items() if numbers}


def poison(pools: Sequence[Region]) -> None:
    """Fills memory with POISON."""
    for pool in pools:
        device_bytes(pool.address, pool.size).fill_(POISON)


def differing_positions(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the positions at which two sequences of the same length differ."""
    return [at for at, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]


def put_back(regions: Sequence[Region], before: Sequence[Sequence[int]], contents: Path) -> None:
    """Restores every chunk whose contents have changed."""
    with open(contents, "rb") as file:
        for position, numbers in changed_chunks(before, region_digests(regions)).items():
            region = regions[position]
            for number in numbers:
                begin, size = region.chunk(number)
                file.seek(region.begin + begin)
                region.memory(number).copy_(torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8))
    torch.cuda.synchronize()


def pool_contents(regions: Sequence[Region]) -> Iterator[tuple[Place, int]]:
    """Yields the chunks in private pools, with the offsets of their bytes in the file of contents."""
    for region in regions:
        for number in range(0 if region.span else region.chunks):
            yield region.place(number), region.begin + region.chunk(number)[0]
