"""examples/tensor_parallel.py in the shape of the variable SHAPE. Weights come from one pool of random numbers, so that their
creation takes only seconds.

`cgcompile build tests/bench/world/shares.py --world 2`; `whole.py` is the same model on one GPU.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
decoder: ModuleType = importlib.import_module("tensor_parallel")

POOL = (1 << 24) + 43
"""Size of the pool, a prime number, so that rows of a matrix do not repeat."""


@cache
def pool() -> torch.Tensor:
    """Returns normal random numbers, the same in every process."""
    return torch.randn(POOL, generator=torch.Generator().manual_seed(0))


def weight(name: str, rows: int, columns: int, rank: int, world: int, split: int) -> nn.Parameter:
    """Replaces `tensor_parallel.weight`: takes consecutive numbers of the pool, from an offset that depends on the name."""
    source, count, at = (pool() * columns**-0.5).to(decoder.DTYPE), rows * columns, decoder.hash_of(name) % POOL
    whole = torch.cat([source[at:], source.repeat(count // POOL + 1)])[:count].view(rows, columns)
    part = whole if split < 0 else whole.chunk(world, split)[rank]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


decoder.weight = weight  # type: ignore[attr-defined]
model, inputs = decoder.model, decoder.inputs
