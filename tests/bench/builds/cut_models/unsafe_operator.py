"""Twelve blocks, with a custom operator tagged cudagraph_unsafe in the middle."""

import blocks
import torch


@torch.library.custom_op("cgcompile_bench::by_norm", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def by_norm(x: torch.Tensor) -> torch.Tensor:
    """Sorts the positions of every sequence by norm, largest first."""
    order = torch.argsort(x.norm(dim=-1), dim=1, descending=True)
    return torch.gather(x, 1, order.unsqueeze(-1).expand_as(x))


@by_norm.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def model() -> torch.nn.Module:
    return blocks.make(by_norm)


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return blocks.example(batch)
