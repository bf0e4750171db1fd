"""The rows of the manifest for a model with a single region.  All targets use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cgbundle.format.schema import IntKey, Program, Region, Step, Value

WHOLE = "model"
"""The name of the region, if a program has only one."""


def whole_region(
    kind: Literal["graph", "host"], reason: str = "", file: str = "", constants: tuple[tuple[str, int], ...] = (), name: str = WHOLE
) -> Region:
    """Returns the row of the only region.  If all int_keys share it, it is number 0 of the manifest."""
    return Region(name=name, kind=kind, reason=reason, file=file, constants=constants)


def whole_program(
    kind: Literal["graph", "host"],
    key: IntKey,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    file: str = "",
    arena: int = 0,
    static: int = 0,
    region: int = 0,
) -> Program:
    """Returns the program of an int_key: a single step with region number `region`."""
    sources, targets = tuple(range(len(inputs))), tuple(range(len(inputs), len(inputs) + len(outputs)))
    step = Step(kind=kind, region=region, file=file, inputs=sources, outputs=targets)
    return Program(key=key, values=(*inputs, *outputs), inputs=sources, outputs=targets, steps=(step,), arena=arena, static=static)
