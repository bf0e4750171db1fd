"""Twelve blocks, with x[x > 0].sum() in the middle."""

import blocks
import torch


def between(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + x[x > 0].sum() / x.numel())


def model() -> torch.nn.Module:
    return blocks.make(between)


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return blocks.example(batch)
