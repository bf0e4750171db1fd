"""The ranks of a model over several devices, each built by a process of its own, side by side.

What eager PyTorch says of a rank needs the other ones: where a model calls a collective, the processes wait for each other, through
PyTorch's own backend for CPUs (gloo).  They go through the same stages in the same order, and may ask each other on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others, of which one may lower what another has in the cache.  One that fails ends all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process builds rank number `rank` of `size`."""

    rank: int
    size: int

    def gathered(self, value: Value) -> list[Value]:
        """What every rank gives here, in their order."""
        object_list: list[Value] = [value] * self.size
        dist.all_gather_object(object_list, value)
        return object_list

    def scattered(self, values: Sequence[Value]) -> Value:
        """Of what rank 0 gives for each rank, this one's; what others give is not looked at."""
        object_list = [list(values)]
        dist.broadcast_object_list(object_list)
        share: Value = object_list[0][self.rank]
        return share


@contextmanager
def joined(rank: int, size: int, meeting: Path) -> Iterator[Ranks]:
    """This process as one of the ranks, which meet at a file that is not there yet."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all of them are on this machine, whose name may mean nothing
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield Ranks(rank=rank, size=size)
    finally:
        dist.destroy_process_group()
