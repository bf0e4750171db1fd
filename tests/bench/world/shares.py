"""examples/tensor_parallel.py in the shape of the variable SHAPE, its weights from one pool of random numbers: drawn in seconds.

`cgcompile build tests/bench/world/shares.py --world 2`; `whole.py` beside it is the same model on one GPU.
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
"""Numbers, a prime: rows of a matrix do not repeat."""


@cache
def pool() -> torch.Tensor:
    """Normal numbers, the same in every process."""
    return torch.randn(POOL, generator=torch.Generator().manual_seed(0))


def weight(name: str, rows: int, columns: int, rank: int, world: int, split: int) -> nn.Parameter:
    """`tensor_parallel.weight`: numbers of the pool one after the other, from a place that the name gives."""
    source, count, at = (pool() * columns**-0.5).to(decoder.DTYPE), rows * columns, decoder.hash_of(name) % POOL
    whole = torch.cat([source[at:], source.repeat(count // POOL + 1)])[:count].view(rows, columns)
    part = whole if split < 0 else whole.chunk(world, split)[rank]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


decoder.weight = weight  # type: ignore[attr-defined]
model, inputs = decoder.model, decoder.inputs
