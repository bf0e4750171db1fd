"""All cases of the corpus."""

from __future__ import annotations

from ..case import Case
from . import (
    control,
    devices,
    layers,
    lengths,
    memory,
    operators,
    random,
    scalars,
    shapes,
)

CASES: tuple[Case, ...] = (
    *scalars.CASES,
    *shapes.CASES,
    *lengths.CASES,
    *devices.CASES,
    *control.CASES,
    *random.CASES,
    *operators.CASES,
    *memory.CASES,
    *layers.CASES,
)
