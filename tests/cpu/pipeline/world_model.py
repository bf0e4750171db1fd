"""A model over several GPUs that calls every collective; its rows are independent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

WIDTH, HIDDEN = 16, 32


class Shares(nn.Module):
    """Two products that are split over the ranks. Their sum, and the results of the other collectives on this sum, are outputs."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.rank, self.world = rank, world
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH, generator=generator).chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN, generator=generator).chunk(world, 1)[rank].clone())
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = dist.group.WORLD
        self.calls += 1
        total = collectives.all_reduce((x @ self.up.t()).relu() @ self.down.t(), "sum", group)
        scaled_total = total * (self.rank + 1)
        gathered = collectives.all_gather_tensor(scaled_total[:, :3].contiguous(), 0, group)  # 12 bytes per row
        scattered = collectives.reduce_scatter_tensor(scaled_total.t().to(torch.bfloat16).contiguous(), "sum", 0, group)
        first = collectives.broadcast(scaled_total[:1], 1, group)
        turned = collectives.all_to_all_single(scaled_total.amax(0), None, None, group)  # split along a fixed axis
        return total, gathered, scattered.float(), first, turned, self.calls


def model(rank: int, world: int) -> nn.Module:
    return Shares(rank, world)


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, WIDTH),)
