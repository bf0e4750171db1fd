"""The corpus: all rooms."""

from __future__ import annotations

from . import (
    corpus_control,
    corpus_devices,
    corpus_layers,
    corpus_lengths,
    corpus_memory,
    corpus_operators,
    corpus_random,
    corpus_scalars,
    corpus_shapes,
)
from .case import Case

CASES: tuple[Case, ...] = (
    *corpus_scalars.CASES,
    *corpus_shapes.CASES,
    *corpus_lengths.CASES,
    *corpus_devices.CASES,
    *corpus_control.CASES,
    *corpus_random.CASES,
    *corpus_operators.CASES,
    *corpus_memory.CASES,
    *corpus_layers.CASES,
)
