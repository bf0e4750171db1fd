"""What a model says of its own weights where they are quantized."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The attribute `quantization` of a model: how its weights are stored, in words, their bytes `before` and `after`, and how far
    results are from those of the weights before."""

    stored: str
    before: int
    after: int
    error: str
