"""Kernels that may be launched while the one before still runs (programmatic dependent launch, from sm_90 on).

The first thing that such a kernel does is to wait until everything before it has ended and can be seen.  So nothing but its launch
overlaps with the kernel before, and a chain of such kernels is ordered as without: a kernel ends after its own wait, thus after all
that came before it.  Behind the wait it allows the next kernel's launch, which takes effect when all of its blocks run.

CUDA C++ Programming Guide, Programmatic Dependent Launch and Synchronization; PTX ISA, griddepcontrol.  Triton 3.6 and 3.7:
`tl.extra.cuda.gdc_wait`, `gdc_launch_dependents`.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from ..lowered import KernelVariant, Lowered

CAPABILITY = 90
"""The lowest compute capability that has it."""

STATEMENTS = ("tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()")
"""What such a kernel begins with."""


def with_early_launches(lowered: Lowered) -> Lowered:
    """The program with kernels that wait for those before them."""
    return replace(lowered, variants=tuple([waiting(variant) for variant in lowered.variants]))


def waiting(variant: KernelVariant) -> KernelVariant:
    """The kernel, which waits before anything else."""
    lines = variant.source.split("\n")
    first = _first_statement(variant)
    indent = " " * first.col_offset
    lines[first.lineno - 1 : first.lineno - 1] = [indent + statement for statement in STATEMENTS]
    return replace(variant, source="\n".join(lines))


def waits(variant: KernelVariant) -> bool:
    """Whether the kernel waits before anything else."""
    return ast.unparse(_first_statement(variant)) == STATEMENTS[0]


def _first_statement(variant: KernelVariant) -> ast.stmt:
    """Of the kernel's function, which stands in its source beside helpers."""
    functions = [each for each in ast.parse(variant.source).body if isinstance(each, ast.FunctionDef)]
    return next(each.body[0] for each in functions if each.name == variant.name)
