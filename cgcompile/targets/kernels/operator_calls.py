"""Operators that have a function in C++ of ours (operators.cpp) stay calls; Inductor's code calls the function.

Private of torch (2.11, 2.13): the option `aot_inductor.custom_ops_to_c_shims`.  Where Inductor has no such option, the operators
become the operations that they are written with, as those of other libraries do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch._inductor.config
from torch.export import ExportedProgram

from ...transforms.inlining import custom_operators, inlined
from . import operators

OPTION = "aot_inductor.custom_ops_to_c_shims"


def own_operators(program: ExportedProgram) -> set[Any]:
    """Those that a program calls."""
    known = operators.DECLARED if OPTION in torch._inductor.config.get_config_copy() else {}
    return {operator for operator in custom_operators(program) if operator._schema.name in known}


def without_python(program: ExportedProgram) -> ExportedProgram:
    """The same program without operators that need Python at run time.  Raises as `inlined`."""
    known_operators = own_operators(program)
    return inlined(program, custom_operators(program) - known_operators if known_operators else None)


def options(called: Collection[Any]) -> Mapping[str, Any]:
    """Options of Inductor for a program that calls such operators."""
    return {OPTION: {operator: [operators.declaration(operator._schema.name)] for operator in called}} if called else {}
