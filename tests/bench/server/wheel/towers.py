"""A model with two entries for `cgcompile build`: users and items as vectors of the same width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

USER, ITEM, WIDTH = 12, 20, 8


class Towers(nn.Module):
    """`user` reads numbers, `item` reads token ids as a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(USER, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.words = nn.Embedding(100, 32)
        self.right = nn.Linear(32, WIDTH)

    def user(self, features: torch.Tensor) -> torch.Tensor:
        return self.left(features)

    def item(self, ids: torch.Tensor) -> torch.Tensor:
        return self.right(self.words(ids).mean(1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Towers().eval()


def user_inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, USER),)


def item_inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 100, (batch, ITEM)),)


def entries() -> dict[str, Callable[[int], tuple[torch.Tensor]]]:
    return {"user": user_inputs, "item": item_inputs}
