"""Common layers and blocks: a CUDA graph can record all of them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import case, images, rows, sequences, tokens

_case = partial(case, kind="layers")


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedPerceptron(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RootMeanSquareNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class RotaryComplex(nn.Module):
    """Rotary positions as products of complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), torch.tensor([1.0, 0.1, 0.01, 0.001]).to(x.device))
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)


class RotaryHalves(nn.Module):
    """Rotary positions with cosines and sines from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6.0), 10000 ** (-torch.arange(4.0) / 4))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-high, low], dim=-1) * self.sin


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TokenLogits(nn.Module):
    """An embedding and a head with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.layer_norm(self.embed(ids), (8,)) @ self.embed.weight.t()


class BagOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(16, 8, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.norm(self.conv(x)).relu(), 2)


class Upsample(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="bilinear")


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


class GroupNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class HistogramOfTokens(nn.Module):
    """A repetition penalty, which lowers the logits of seen tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        seen = torch.zeros(ids.shape[0], 16, device=ids.device).scatter(1, ids, 1.0)
        return torch.where(seen > 0, -1.0, 1.0)


class BeamSearchStep(nn.Module):
    """The best continuations, and the beams that they extend."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score, flat = x.log_softmax(-1).flatten(1).topk(4)
        beam = flat // 8
        return score, x.gather(1, beam[..., None].expand(-1, -1, 8))


CASES = (
    _case(Perceptron, rows),
    _case(GatedPerceptron, rows),
    _case(RootMeanSquareNorm, rows),
    _case(RotaryComplex, sequences),
    _case(RotaryHalves, sequences),
    _case(Attention, sequences),
    _case(TokenLogits, tokens),
    _case(BagOfTokens, tokens),
    _case(Convolution, images),
    _case(Upsample, images),
    _case(Lstm, sequences),
    _case(GroupNorm, rows),
    _case(HistogramOfTokens, tokens),
    _case(BeamSearchStep, sequences),
)
