"""relu -> sum().cpu() -> softmax: a copy to the CPU between two graphs."""

import torch


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        total = y.sum().cpu()
        return torch.softmax(y / (total + 1.0), -1)


def model() -> torch.nn.Module:
    return Net().eval()


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 1024),)
