"""Selects the method by which a collective sends its data, and the blocks and threads of its kernel."""

from __future__ import annotations

from dataclasses import dataclass

from .kernels import PIECE, Way

PACKETS = 512 << 10
"""Up to this many bytes from one rank to another are sent as packets.  Microseconds of an all_reduce in a graph on two H100 with
NVLink, with packets and with buffers: 64 KB 2.6 and 4.2, 256 KB 3.7 and 4.8, 512 KB 5.2 and 5.6, 1 MB 8.1 and 7.2, 2 MB 13.9 and
10.8."""

_NARROW, _WIDE, _BLOCKS = 256, 1024, {"packets": 64, "buffers": 128}
"""The threads of a block for few and for many pieces, and the largest number of blocks per method.  From 8 KB to 4 MB these are the
best of the measured values, or within 3 % of the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLaunch:
    """The method and the launch shape.  `count`: the pieces from one rank to another."""

    way: Way
    count: int
    blocks: int
    threads: int


def collective_launch(size: int, way: Way | None = None) -> CollectiveLaunch:
    """Returns the launch for `size` bytes from each rank to each other rank, which is the same on all ranks.  `way`: the required
    method, None for the faster one.  Raises ValueError if `size` is not a positive multiple of 16."""
    if size % 16 or size <= 0:
        raise ValueError(f"{size} bytes: expected a multiple of 16")
    way = way or ("packets" if size <= PACKETS else "buffers")
    count, max_blocks = size // PIECE[way], _BLOCKS[way]
    threads = _NARROW if count <= _NARROW * max_blocks // 2 else _WIDE if way == "packets" else _WIDE // 2
    return CollectiveLaunch(way=way, count=count, blocks=min(max_blocks, -(-count // threads)), threads=threads)
