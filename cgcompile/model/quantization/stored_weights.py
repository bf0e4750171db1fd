"""Describes the quantized weights of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The attribute `quantization` of a model.  `stored` describes the format of the weights, as text.  `before` and `after` are
    the bytes of the weights before and after the quantization.  `error` says how much the results differ from those of the original
    weights."""

    stored: str
    before: int
    after: int
    error: str
