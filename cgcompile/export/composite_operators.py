"""Operators of other libraries that are written with PyTorch's own."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

PYTORCH = frozenset({"aten", "prim", "prims", "cgcompile"})
"""Namespaces of operators that compilers know."""


def without_composites(program: ExportedProgram) -> ExportedProgram:
    """The program with such operators spelled out.  torch.export keeps their calls (torchao's quantization of an activation, say),
    which no process could run without the library."""
    calls = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    others = [op for op in calls if op.namespace not in PYTORCH]
    table = torch.export.default_decompositions() if others else {}
    composites = {op: table[op] for op in others if op in table}
    return program.run_decompositions(composites) if composites else program
