"""Twelve transformer blocks with a function between the sixth and the seventh."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

WIDTH, HEADS, LENGTH, LAYERS = 512, 8, 64, 12


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.into, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        q, k, v = self.into(self.first(x)).view(batch, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, LENGTH, WIDTH)
        x = x + self.out(mixed)
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Blocks(torch.nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == LAYERS // 2 - 1:
                x = self.between(x)
        return x


def make(between: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    torch.manual_seed(0)
    return Blocks(between).eval()


def example(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, LENGTH, WIDTH),)
