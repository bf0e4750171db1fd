"""Work on the CPU, copies between devices, several GPUs, pinned memory; and moves without effect."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..case import case, rows, sequences, tokens, two

_case = partial(case, kind="devices")

CPU, COPY = "cpu-operation", "device-copy"


class SumOnTheCpu(nn.Module):
    """relu, a sum on the CPU, softmax: the usual example in texts on CUDA graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        total = y.sum().cpu()
        return (y / total.to(x.device)).softmax(-1)


class LogitsToTheCpu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1).cpu()


class SampleOnTheCpu(nn.Module):
    """Greedy decoding that selects the token on the host."""

    def forward(self, x: Tensor) -> Tensor:
        choice = x.to("cpu").topk(3).indices
        return x.gather(1, choice.to(x.device))


class HalfOnTheCpu(nn.Module):
    """Float64 statistics on the host, copied back."""

    def forward(self, x: Tensor) -> Tensor:
        host = x.to(device="cpu", dtype=torch.float64)
        spread = host.std(1, keepdim=True)
        return x / spread.to(device=x.device, dtype=x.dtype)


class TableOnTheCpu(nn.Module):
    """An embedding table too large for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.project = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table.weight.cpu()[ids.cpu()]
        return self.project(rows.to(ids.device))


class MaskMadeOnTheCpu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cpu").tril()
        return (x @ x.transpose(1, 2)).masked_fill(~mask.to(x.device), float("-inf"))


class MaskMadeOnTheDevice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))


class MoveToOwnDevice(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y.to(x.device)


class MoveToCuda(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cuda().relu()


class MoveToHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.float16) * 2).float()


class TypeAsOther(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.type_as(y) + torch.zeros_like(y)


class LiteralOnTheDevice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0] * 4, device=x.device)


class LiteralMoved(nn.Module):
    """A literal is created on the CPU and moved in every call."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0] * 4).to(x.device)


class ScalarOfTheCpu(nn.Module):
    """Operations accept a CPU scalar together with a GPU tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(0.5)


class PositionsMoved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1]).to(x.device)[:, None]


class TableInAnAttribute(nn.Module):
    """A tensor that is not a buffer: model.to(device) does not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offsets.to(x.device)


class TableInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offsets.to(x.device)


class SecondDevice(nn.Module):
    """Layers on two GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.relu().to("cuda:1") * 2).to("cuda:0")


class PinnedCopy(nn.Module):
    """Results are staged in pinned memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().cpu().pin_memory()


class AsynchronousCopy(nn.Module):
    """An asynchronous copy that is read at once."""

    def forward(self, x: Tensor) -> Tensor:
        host = x.relu().to("cpu", non_blocking=True)
        return host + 1


CASES = (
    _case(SumOnTheCpu, rows, COPY),
    _case(LogitsToTheCpu, rows, COPY),
    _case(SampleOnTheCpu, rows, COPY, CPU),
    _case(HalfOnTheCpu, rows, COPY, CPU),
    _case(TableOnTheCpu, tokens, COPY, CPU),
    _case(MaskMadeOnTheCpu, sequences, CPU),
    _case(MaskMadeOnTheDevice, sequences, near=("cpu-operation",)),
    _case(MoveToOwnDevice, two, near=("device-copy",)),
    _case(MoveToCuda, rows, near=("several-devices",)),
    _case(MoveToHalf, rows, near=("device-copy",)),
    _case(TypeAsOther, two, near=("device-copy",)),
    _case(LiteralOnTheDevice, rows, near=("cpu-operation",)),
    _case(LiteralMoved, rows, near=("cpu-operation",)),
    _case(ScalarOfTheCpu, rows, near=("cpu-operation",)),
    _case(PositionsMoved, sequences, near=("cpu-operation",)),
    _case(TableInAnAttribute, rows, near=("device-copy",)),
    _case(TableInABuffer, rows, near=("device-copy",)),
    _case(SecondDevice, rows, "several-devices"),
    _case(PinnedCopy, rows, COPY, "pinned-memory"),
    _case(AsynchronousCopy, rows, COPY, CPU, near=("pinned-memory",)),
)
