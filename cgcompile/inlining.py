"""Custom operators of a host region, written in Python over PyTorch's own operations, become what they do.

The code of a host region runs without Python, where a custom operator would have to be called through the interpreter that
registered it.  One that PyTorch can trace is traced; any other is refused.

Private interface (torch 2.11, 2.13): `torch._library.custom_ops`, for the Python functions behind `torch.library.custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from .errors import OperatorWithoutCode, TorchUnsupported
from .source import Source, first_line

OWN = frozenset({"aten", "prims", "prim", "quantized", "cgcompile"})
"""Namespaces of operators that PyTorch registers itself, or we do."""


def inline_custom(program: ExportedProgram) -> ExportedProgram:
    """The same program without custom operators.  Raises OperatorWithoutCode, TorchUnsupported."""
    for _ in range(8):  # an operator may be written with others
        operators = custom_operators(program)
        if not operators:
            return program
        try:
            program = program.run_decompositions({op: _function(op) for op in operators})
        except OperatorWithoutCode:
            raise
        except Exception as error:
            names = ", ".join(sorted(op.name() for op in operators))
            raise OperatorWithoutCode(
                f"{names}: runs on the host without Python, and its code cannot be traced: {first_line(error)}"
            ) from error
    raise OperatorWithoutCode(f"{', '.join(sorted(op.name() for op in custom_operators(program)))}: calls itself")


def custom_operators(program: ExportedProgram) -> set[Any]:
    """The operators of other libraries that a program calls."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = {node.target for module in modules for node in module.graph.nodes if node.op == "call_function"}
    return {op for op in targets if isinstance(op, torch._ops.OpOverload) and op.namespace not in OWN}


def code_of(source: Source, program: ExportedProgram) -> str:
    """What another process must import before it loads the program ("": nothing).  Raises OperatorWithoutCode."""
    operators = custom_operators(program)
    if operators and not source.code:
        names = ", ".join(sorted(op.name() for op in operators))
        raise OperatorWithoutCode(
            f"{names}: registered where the processes of a build cannot import it",
            "put the model and its operators into a file of their own",
        )
    return source.code if operators else ""


def _function(op: Any) -> Callable[..., Any]:
    """What the operator's author registered for the CPU, or for every device."""
    import torch._library.custom_ops as custom_ops

    if not hasattr(custom_ops, "OPDEFS"):
        raise TorchUnsupported(
            f"torch {torch.__version__} does not say what custom operators do; cgcompile was tested with 2.11 and 2.13"
        )
    made = custom_ops.OPDEFS.get(f"{op.namespace}::{op._opname}")
    found = getattr(made, "_backend_fns", {})
    function: Callable[..., Any] | None = found.get("cpu") or found.get(None)
    if function is None:
        raise OperatorWithoutCode(f"{op.name()}: runs on the host without Python, and has no Python code for the CPU to be traced")
    return function
