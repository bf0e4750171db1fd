"""LoRA adapters for one model: every row of a batch selects an adapter by its slot in a bank of adapters; slot 0 is empty.

    cgcompile build examples/lora.py --sizes 1,8 -o lora.cgb

The bank is state, which the entry `load` writes: `program.load(slot, down, up)` is a call like any other, and needs no new
recording.  If all rows use one adapter, merge it into the weights instead: `program.update(merged(...), partial=True)`.

LORA_LAYERS (default 4), LORA_WIDTH (256), LORA_RANK (16) and LORA_SLOTS (8) set the sizes; LORA_DTYPE is float32 (default),
bfloat16 or float16.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYERS, WIDTH, RANK, SLOTS = [
    int(os.environ.get(f"LORA_{name}", default)) for name, default in (("LAYERS", 4), ("WIDTH", 256), ("RANK", 16), ("SLOTS", 8))
]
DTYPE = DTYPES[os.environ.get("LORA_DTYPE", "float32")]


class Network(nn.Module):
    """Linear layers with a bank of adapters: x (batch, TOKENS, WIDTH), slot (batch,) int64 -> the shape of x.

    `down` (LAYERS, SLOTS, RANK, WIDTH) and `up` (LAYERS, SLOTS, WIDTH, RANK) are the two factors of every adapter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("down", torch.zeros(LAYERS, SLOTS, RANK, WIDTH), persistent=False)
        self.register_buffer("up", torch.zeros(LAYERS, SLOTS, WIDTH, RANK), persistent=False)

    def forward(self, x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Adds the product of each row's adapter to the product of every layer."""
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            added = (x @ down[slot].transpose(1, 2)) @ up[slot].transpose(1, 2)
            x = x + F.gelu(layer(x) + added)
        return x

    def load(self, slot: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Stores an adapter, (LAYERS, RANK, WIDTH) and (LAYERS, WIDTH, RANK), in a slot, int64 (1,).  Do not write slot 0."""
        self.down[:, slot] = down.unsqueeze(1)
        self.up[:, slot] = up.unsqueeze(1)
        return slot


def model() -> nn.Module:
    """Returns the network with the same random weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network().to(DTYPE).eval()


def rows(batch: int) -> tuple[torch.Tensor, ...]:
    """Returns rows that use all slots."""
    return torch.randn(batch, TOKENS, WIDTH, dtype=DTYPE), torch.randint(0, SLOTS, (batch,))


def adapter() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two factors of an adapter with random numbers."""
    return torch.randn(LAYERS, RANK, WIDTH).to(DTYPE) / WIDTH**0.5, torch.randn(LAYERS, WIDTH, RANK).to(DTYPE) / RANK


def entries() -> dict[str, object]:
    """Returns the entries `program(x, slot)` and `program.load(slot, down, up)`."""
    return {"forward": rows, "load": lambda: (torch.randint(1, SLOTS, (1,)), *adapter())}


def merged(weights: dict[str, torch.Tensor], down: torch.Tensor, up: torch.Tensor) -> dict[str, torch.Tensor]:
    """Adds an adapter to the layers' weights of a state_dict, for `program.update(..., partial=True)`."""
    names = [f"layers.{layer}.weight" for layer in range(len(down))]
    return {name: weights[name] + up[layer] @ down[layer] for layer, name in enumerate(names)}
