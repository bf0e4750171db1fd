"""Launches that exchange data between ranks: kernels with addresses of memory `peer`. All ranks have the same launches in the same
order, because each waits for those of the other ranks."""

from __future__ import annotations

from itertools import count, pairwise
from struct import Struct
from typing import NamedTuple

from ..errors import BundleError
from ..format.schema import MEMORIES, World
from .table import KERNEL, Table

PEER = MEMORIES.index("peer")

INPUT, OUTPUT, FIRST_PEER = 0, 8, 16
"""Offsets in the parameter block: addresses of input and output, then of each rank's part of memory `peer`."""

_REST = Struct("<QIII")
"""After the addresses: bytes between the data of two ranks, pieces per rank, the kernel's rank, the sending ranks as bits."""


class Exchange(NamedTuple):
    """The part of a launch that is the same on every rank. `grid` and `threads` along x."""

    image: str
    symbol: str
    grid: int
    threads: int
    stride: int
    pieces: int
    senders: int


def params(world: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) of the kernel's parameters for `world` ranks."""
    places = [(8 * place, 8) for place in range(world + 3)]
    return tuple(places + [(8 * (world + 3) + 4 * place, 4) for place in range(3)])


def packed(world: int, stride: int, pieces: int, rank: int, senders: int) -> bytes:
    """A parameter block with zeros for addresses."""
    return bytes(FIRST_PEER + 8 * world) + _REST.pack(stride, pieces, rank, senders)


def unpacked(world: int, block: bytes) -> tuple[int, int, int, int]:
    numbers: tuple[int, int, int, int] = _REST.unpack_from(block, FIRST_PEER + 8 * world)
    return numbers


def exchanges(table: Table, world: World | None) -> list[Exchange]:
    """The exchanges of a checked table, in order. Raises table-invalid unless each has the parts of all ranks and the bundle's
    rank, none is in a branch or a loop, and the nodes of a table with exchanges run in sequence."""
    if PEER not in bytes(table.relocation_memory):
        return []
    bounds, launches, kernels = table.relocation_bounds.tolist(), [], count()
    for position, kind in enumerate(bytes(table.kind)):
        if kind != KERNEL:
            continue
        kernel = next(kernels)
        rows = range(bounds[kernel], bounds[kernel + 1])
        places = [(table.relocation_at[row], table.relocation_memory[row], table.relocation_offset[row]) for row in rows]
        if not any([memory == PEER for _, memory, _ in places]):
            continue
        where = f"{table.where}: nodes[{position}]"
        if world is None:
            raise BundleError("table-invalid", f"{where}: memory peer, in a bundle for one device")
        if table.graph(position):
            raise BundleError("table-invalid", f"{where}: an exchange between ranks in a branch or a loop")
        peers = [(FIRST_PEER + 8 * rank, PEER, rank * world.stride) for rank in range(world.size)]
        function = table.function[kernel]
        first, last = table.param_bounds[function], table.param_bounds[function + 1]
        layout = tuple(zip(table.param_offset[first:last], table.param_size[first:last], strict=True))
        known = layout == params(world.size) and [at for at, _, _ in places[:2]] == [INPUT, OUTPUT] and places[2:] == peers
        if not known or any([memory == PEER for _, memory, _ in places[:2]]):
            raise BundleError("table-invalid", f"{where}.relocations: not those of an exchange between {world.size} ranks")
        begin, size = table.block_offset[kernel], table.block_size[kernel]
        stride, pieces, rank, senders = unpacked(world.size, bytes(table.blocks[begin : begin + size]))
        if rank != world.rank:
            raise BundleError("table-invalid", f"{where}.block: of rank {rank}, the bundle is rank {world.rank}'s")
        shape = table.grid_x[kernel], table.threads_x[kernel]
        launches.append(Exchange(table.images[function], table.symbols[function], *shape, stride, pieces, senders))
    edges = sorted(zip(table.edge_source, table.edge_target, strict=True))
    if edges != list(pairwise(range(table.counts["nodes"]))):
        raise BundleError("table-invalid", f"{table.where}: edges: with exchanges between ranks the nodes run one after the other")
    return launches
