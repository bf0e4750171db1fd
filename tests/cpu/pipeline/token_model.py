"""A bfloat16 model with integers that Inductor rounds differently than eager PyTorch, and with constants in its call."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import cgcompile
from tests.helpers.bundles.shared_builds import shared_build

VOCABULARY, FIRST = 4096, 10**6


class Token(nn.Module):
    """Returns the logits, and the index of the largest score plus a million: a wrong index differs by less than 4 %."""

    def forward(
        self, x: torch.Tensor, mode: str = "a", *, scale: object = None, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        logits = (x * 1.01 + 0.3) / temperature + (0 if mode == "a" else 1)
        scores = (x * 1.01 + 0.3) * 1.7 + 0.1  # Inductor omits the rounding to bfloat16 that makes ties
        token = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)  # argmax of integers: no floats show a near tie
        return {"logits": logits, "token": token + FIRST, "flag": x[:, 0] > 0}


def inputs(batch: int) -> dict[str, object]:
    return {"x": torch.rand(batch, VOCABULARY).to(torch.bfloat16), "mode": "b", "temperature": 2.0}


def build(folder: Path, *allow: str) -> cgcompile.Built:
    return cgcompile.build(Token(), inputs, sizes=[8], out=folder / "token.cgb", target="cpu", allow=allow)


def allowed() -> Path:
    """Returns the bundle that allows mismatched integers."""
    return shared_build("token", lambda folder: build(folder, "mismatched-integers")) / "token.cgb"
