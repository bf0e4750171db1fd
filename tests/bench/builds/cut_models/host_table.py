"""A model with an embedding table of 100 MB that stays on the CPU."""

import torch
import torch.nn.functional as F


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(50_000, 512))
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512), torch.nn.ReLU()] * 4)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids.cpu(), self.table).to(scale.device)
        return self.layers(rows).mean(1) * scale


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 50_000, (batch, 16)), torch.rand(batch, 1) + 0.5
