"""Programmatic dependent launch: a kernel of a graph is launched while the one before it still runs, and waits for its end by
itself, first of all.  That saves the time from the end of one kernel to the beginning of the next, from compute capability 9.0 on.

A kernel may be launched early only if it waits before it touches memory, and then nothing about its data changes: when it goes on,
the kernel before it has ended, which for its part waited for all before.  So a chain of such kernels has one order, as others do.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import replace

from cgbundle.tables.recording import Edge, KernelNode, Node
from cgbundle.validate.recordings import EDGE_PROGRAMMATIC, KERNEL_PORT_PROGRAMMATIC

CAPABILITY = 90
"""The first that has the instruction (PTX 7.8, griddepcontrol)."""

STATEMENTS = ("tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()")
"""What a Triton kernel begins with: it waits, and then the next one may be launched as soon as every block of this one runs."""


def waiting(source: str, name: str) -> str:
    """The Python source of Triton kernel `name` that waits first."""
    (function,) = [each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef) and each.name == name]
    first = function.body[0]
    lines = source.split("\n")
    lines[first.lineno - 1 : first.lineno - 1] = [" " * first.col_offset + each for each in STATEMENTS]
    return "\n".join(lines)


def launched_early(nodes: Sequence[Node], edges: Sequence[Edge], waits: Collection[int]) -> tuple[Edge, ...]:
    """The edges of a recording, those from a kernel to one of the functions `waits`, which wait by themselves, programmatic."""

    def early(edge: Edge) -> bool:
        source, target = nodes[edge.source], nodes[edge.target]
        return isinstance(source, KernelNode) and isinstance(target, KernelNode) and target.function in waits

    return tuple(
        [replace(edge, from_port=KERNEL_PORT_PROGRAMMATIC, type=EDGE_PROGRAMMATIC) if early(edge) else edge for edge in edges]
    )
