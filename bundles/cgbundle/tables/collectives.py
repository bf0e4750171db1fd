"""The launches of a recording that exchange data between the ranks of a model: those of kernels that take memory `peer`.

All ranks have to launch the same ones in the same order: a kernel waits for its like on every other rank.
"""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from ..errors import BundleError
from ..format.schema import MEMORIES, World
from .table import KERNEL, Table

PEER = MEMORIES.index("peer")

INPUT, OUTPUT, FIRST_PEER = 0, 8, 16
"""Offsets in the parameter block of such a kernel: the addresses of the input and the output, and of the ranks' parts in memory
`peer`, in their order."""

_REST = Struct("<QIII")
"""Behind these: the bytes from what is sent to one rank to what is sent to the next, how many pieces each gets, the own rank, and
as bits the ranks that send."""


class Exchange(NamedTuple):
    """A launch, as far as it has to be the same on every rank.  `grid` and `threads` along x."""

    image: str
    symbol: str
    grid: int
    threads: int
    stride: int
    pieces: int
    senders: int


def params(world: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) of the parameters of such a kernel for so many ranks."""
    places = [(8 * place, 8) for place in range(world + 3)]
    return tuple(places + [(8 * (world + 3) + 4 * place, 4) for place in range(3)])


def packed(world: int, stride: int, pieces: int, rank: int, senders: int) -> bytes:
    """A parameter block, zeros where addresses go."""
    return bytes(FIRST_PEER + 8 * world) + _REST.pack(stride, pieces, rank, senders)


def unpacked(world: int, block: bytes) -> tuple[int, int, int, int]:
    """(stride, pieces, rank, senders) of a parameter block."""
    numbers: tuple[int, int, int, int] = _REST.unpack_from(block, FIRST_PEER + 8 * world)
    return numbers


def exchanges(table: Table, world: World | None) -> list[Exchange]:
    """The launches of a sound table, in order; [] without memory peer.

    Raises table-invalid unless each takes every rank's part of memory peer, and says its own rank; and unless the nodes of a table
    with such launches run one after the other, none of these in a branch or a loop.
    """
    if PEER not in bytes(table.relocation_memory):
        return []
    bounds, launches, kernel = table.relocation_bounds.tolist(), [], -1
    for position, kind in enumerate(bytes(table.kind)):
        kernel += kind == KERNEL
        if kind != KERNEL:
            continue
        rows = range(bounds[kernel], bounds[kernel + 1])
        if not any([table.relocation_memory[row] == PEER for row in rows]):
            continue
        where = f"{table.where}: nodes[{position}]"
        if world is None:
            raise BundleError("table-invalid", f"{where}: memory peer, in a bundle for one device")
        if table.graph(position):
            raise BundleError("table-invalid", f"{where}: an exchange between ranks in a branch or a loop")
        launches.append(_exchange(table, kernel, rows, world, where))
    nodes = table.counts["nodes"]
    edges = sorted(zip(table.edge_source, table.edge_target, strict=True))
    if edges != list(pairwise(range(nodes))):
        raise BundleError("table-invalid", f"{table.where}: edges: with exchanges between ranks the nodes run one after the other")
    return launches


def _exchange(table: Table, kernel: int, rows: range, world: World, where: str) -> Exchange:
    places = [(table.relocation_at[row], table.relocation_memory[row], table.relocation_offset[row]) for row in rows]
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
    return Exchange(table.images[function], table.symbols[function], *shape, stride, pieces, senders)
