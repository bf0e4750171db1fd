"""Which way a collective's data goes, and with how many blocks and threads its kernel is launched.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .kernels import PIECE, Way

PACKETS = 512 << 10
"""The most bytes from one rank to another that go as packets.  Microseconds of an all_reduce in a graph, two H100 with NVLink,
packets beside buffers: 64 KB 2.6 and 4.2, 256 KB 3.7 and 4.8, 512 KB 5.2 and 5.6, 1 MB 8.1 and 7.2, 2 MB 13.9 and 10.8."""

_NARROW, _WIDE, _BLOCKS = 256, 1024, {"packets": 64, "buffers": 128}
"""Threads of a block, few where the blocks are enough for a piece a thread, and the most blocks.  Of all that were measured the
best, or within 3 % of it, between 8 KB and 4 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLaunch:
    """`count`: pieces from one rank to another."""

    way: Way
    count: int
    blocks: int
    threads: int


def collective_launch(size: int, way: Way | None = None) -> CollectiveLaunch:
    """How `size` bytes go from each rank to each other one: the same on all ranks.  `way`: the one that they have to go, None for
    the faster.  Raises ValueError unless they are a multiple of 16."""
    if size % 16 or size <= 0:
        raise ValueError(f"{size} bytes: expected a multiple of 16")
    way = way or ("packets" if size <= PACKETS else "buffers")
    count, most = size // PIECE[way], _BLOCKS[way]
    threads = _NARROW if count <= _NARROW * most // 2 else _WIDE if way == "packets" else _WIDE // 2
    return CollectiveLaunch(way=way, count=count, blocks=min(most, -(-count // threads)), threads=threads)
