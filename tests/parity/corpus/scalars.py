"""Numbers that leave the GPU: `.item()` and similar calls, branches on data, and alternatives without them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..case import case, rows, sequences, tokens, two

_case = partial(case, kind="scalars")


class SumItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class SumWithoutItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum()


class LargestAsInt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        best = int(x.sum(0).argmax())
        return x + best


class ScaleAsFloat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.abs().max()) / 127
        return x / scale


class ScaleAsTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return x / scale


class LengthsAsList(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        first, second = (ids[:2] != 0).sum(1).tolist()
        return ids * first + second


class CheckedItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        torch._check(count <= 1000)
        return x / (count + 1)


class AssertedOnDevice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(torch.isfinite(x).all())
        return x.exp()


class BranchOnSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x.relu()
        return -x


class WhereOnSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.sum() > 0, x.relu(), -x)


class EarlyExit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.tanh()
            if bool((x.abs() < 0.1).all()):
                break
        return x


class LoopUntilItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max())):
            x = x * 0.5
        return x


class CompareWhole(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.exp() if torch.equal(x, y) else y.exp()


class BranchOnShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.shape[1] > 4 else -x


class ScaleByWidth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.shape[1] ** -0.5


class ClampByTensor(nn.Module):
    def forward(self, x: Tensor, bound: Tensor) -> Tensor:
        return x.clamp(max=bound.mean())


class GreedyToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1].argmax(-1)


class ItemAmongLayers(nn.Module):
    """Twelve layers; Python reads one number in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(12)])

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).relu()
            if index == 5:
                x = x / (1 + x.mean().item())
        return x


class LossScale(nn.Module):
    """Python reads a buffer as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.item()


class LearnedTemperature(nn.Module):
    """A scalar weight that stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (x / self.temperature.clamp(min=1e-3)).softmax(-1)


CASES = (
    _case(SumItem, rows, "host-scalar", "data-dependent-follower"),
    _case(SumWithoutItem, rows, near=("host-scalar",)),
    _case(LargestAsInt, rows),
    _case(ScaleAsFloat, rows),
    _case(ScaleAsTensor, rows, near=("host-scalar",)),
    _case(LengthsAsList, tokens, "host-scalar", "data-dependent-follower"),
    _case(CheckedItem, rows, "host-scalar", "data-dependent-follower", near=("assert-scalar",)),
    _case(AssertedOnDevice, rows, near=("assert-scalar",)),
    _case(BranchOnSum, rows, "path", "control-flow"),
    _case(WhereOnSum, rows, near=("data-dependent-branch", "path")),
    _case(EarlyExit, rows, "path", "control-flow"),
    _case(LoopUntilItem, rows, "data-dependent-branch"),
    _case(CompareWhole, two, "path", "control-flow"),
    _case(BranchOnShape, rows, near=("data-dependent-branch",)),
    _case(ScaleByWidth, rows, near=("host-scalar",)),
    _case(ClampByTensor, two, near=("host-scalar",)),
    _case(GreedyToken, sequences, near=("host-scalar",)),
    _case(ItemAmongLayers, rows, "host-scalar", "data-dependent-follower"),
    _case(LossScale, rows, "baked-weight"),
    _case(LearnedTemperature, rows, near=("host-scalar", "baked-weight")),
)
