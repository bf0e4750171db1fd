"""Small models for GPU tests, each with its recorded sizes: name -> Case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and its inputs: `inputs(batch)` returns positional arguments whose axis 0 is the batch."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    sizes: tuple[int, ...]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids (batch, tokens) -> logits of the last token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1]))


class Recurrent(nn.Module):
    """Two stacked LSTM layers, which cuDNN runs in parallel branches."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (h, _) = self.lstm(x)
        return self.head(y[:, -1]), h


class Spectral(nn.Module):
    """A filter in frequency space: cuFFT keeps a pointer to its table in a module variable."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(513))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.gain, n=1024)


class Convolutional(nn.Module):
    """Convolutions in half precision with channels last, batch norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        pairs = list(itertools.pairwise(widths))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in pairs)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3))), x


class Counting(nn.Module):
    """Changes a buffer on every call, has tied weights and a constant, and returns a view of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(1))
        self.scale = torch.arange(32.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return self.second(self.first(x)) * self.scale + self.calls, x[:, ::2]


class Sorting(nn.Module):
    """Kernels with temporary storage: sort, top-k, scan, gather, masked sums."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, order = torch.sort(x, dim=1)
        best, where = torch.topk(x, 5, dim=1)
        return values, order, best, where, torch.cumsum(x, 1), torch.where(x > 0, x, 0).sum(1)


class Noisy(nn.Module):
    """Draws random numbers; must be refused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Overwriting(nn.Module):
    """Writes to its input; must be refused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1


class Reading(nn.Module):
    """Has a data-dependent shape: the host waits for it, so it cannot be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x > 0).sum() + x


def ids(vocabulary: int, tokens: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randint(0, vocabulary, (batch, tokens)),)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randn(batch, *shape, dtype=dtype),)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())))


CASES = {
    "mlp": Case(model=lambda: mlp(1024), inputs=floats(1024), sizes=(1, 8, 32)),
    "mlp_small": Case(model=lambda: mlp(64), inputs=floats(64), sizes=(1, 4)),
    "gpt": Case(model=lambda: GPT(12, 768, 12, 50257, 64).bfloat16(), inputs=ids(50257, 64), sizes=(1, 8, 32)),
    "gpt_small": Case(model=lambda: GPT(2, 64, 2, 256, 16), inputs=ids(256, 16), sizes=(1, 4)),
    "gpt_two": Case(model=lambda: GPT(2, 256, 4, 1000, 32).bfloat16(), inputs=ids(1000, 32), sizes=(1, 4)),
    "lstm": Case(model=Recurrent, inputs=floats(12, 64), sizes=(2, 8)),
    "fft": Case(model=Spectral, inputs=floats(1024), sizes=(2, 8)),
    "conv": Case(
        model=lambda: Convolutional().half().to(memory_format=torch.channels_last),
        inputs=lambda b: (torch.randn(b, 3, 64, 64, dtype=torch.float16).to(memory_format=torch.channels_last),),
        sizes=(1, 8),
    ),
    "counting": Case(model=Counting, inputs=floats(32), sizes=(2, 4)),
    "sorting": Case(model=Sorting, inputs=floats(5000), sizes=(2, 16)),
    "noisy": Case(model=Noisy, inputs=floats(32), sizes=(2,)),
    "overwriting": Case(model=Overwriting, inputs=floats(32), sizes=(2,)),
    "reading": Case(model=Reading, inputs=floats(32), sizes=(2,)),
}
