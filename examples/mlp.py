"""A small MLP: three layers, width 256.  It builds quickly; `make bench` measures the cost of one call with it.

cgcompile build examples/mlp.py --sizes 1,8 -o mlp.cgb
"""

import torch
from torch import nn

WIDTH = 256
CLASSES = 10


def model() -> nn.Module:
    """Returns the network in eval mode, with the same random weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        return nn.Sequential(*layers).eval()


def inputs(batch: int) -> tuple[torch.Tensor]:
    """Returns `batch` feature vectors."""
    return (torch.randn(batch, WIDTH),)
