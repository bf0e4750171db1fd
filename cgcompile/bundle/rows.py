"""The manifest's rows of a program that is one region: alike for every target.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cgbundle.format.schema import IntKey, Program, Region, Step, Value

WHOLE = "model"
"""The name of the one region of a program that is one."""


def whole_region(
    kind: Literal["graph", "host"], reason: str = "", file: str = "", constants: tuple[tuple[str, int], ...] = (), name: str = WHOLE
) -> Region:
    """The region: number 0 of the manifest where it is that of all int_keys."""
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
    """The program of an int_key: one step of the region of that number."""
    sources, targets = tuple(range(len(inputs))), tuple(range(len(inputs), len(inputs) + len(outputs)))
    step = Step(kind=kind, region=region, file=file, inputs=sources, outputs=targets)
    return Program(key=key, values=(*inputs, *outputs), inputs=sources, outputs=targets, steps=(step,), arena=arena, static=static)
