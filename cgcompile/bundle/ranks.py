"""Builds the ranks of a model over several devices, each in its own process, at the same time.

Eager PyTorch needs all ranks to run a collective.  So the processes form a process group with gloo, PyTorch's backend for CPUs.
They run the same stages in the same order, and can exchange values between stages.
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
"""Timeout of a collective.  A rank may have to lower a program for which another rank has a result in the cache.  If a rank fails,
all of them end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The process group, as seen from the process that builds rank `rank` of `size` ranks."""

    rank: int
    size: int

    def gathered(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in order of the ranks.  All ranks must call it."""
        object_list: list[Value] = [value] * self.size
        dist.all_gather_object(object_list, value)
        return object_list

    def scattered(self, values: Sequence[Value]) -> Value:
        """Returns the element for this rank of the list that rank 0 passes.  The lists of other ranks are ignored."""
        object_list = [list(values)]
        dist.broadcast_object_list(object_list)
        share: Value = object_list[0][self.rank]
        return share


@contextmanager
def joined(rank: int, size: int, rendezvous: Path) -> Iterator[Ranks]:
    """Joins the process group as one rank.  `rendezvous` is the path of a file that does not exist yet."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whose host name may not resolve
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield Ranks(rank=rank, size=size)
    finally:
        dist.destroy_process_group()
