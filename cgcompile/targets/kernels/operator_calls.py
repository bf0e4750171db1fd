"""Keeps calls of operators that have a C++ function in operators.cpp, and makes Inductor's code call that function.

Private interface of torch (2.11, 2.13): the option `aot_inductor.custom_ops_to_c_shims`.  If Inductor lacks it, the operations of
their Python code replace these operators, as for operators of other libraries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch._inductor.config
from torch.export import ExportedProgram

from ...transforms.inlining import custom_operators
from . import operators

OPTION = "aot_inductor.custom_ops_to_c_shims"


def own_operators(program: ExportedProgram) -> set[Any]:
    """Returns the operators of `operators.DECLARED` that a program calls."""
    declared = operators.DECLARED if OPTION in torch._inductor.config.get_config_copy() else {}
    return {operator for operator in custom_operators(program) if operator._schema.name in declared}


def options(called: Collection[Any]) -> Mapping[str, Any]:
    """Returns Inductor's options for a program that calls these operators."""
    return {OPTION: {operator: [operators.declaration(operator._schema.name)] for operator in called}} if called else {}
