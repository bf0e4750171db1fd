"""Which operation joins the rows of a declared dimension: read off the program, as running examples may not show it.

A softmax of large numbers, say, is the same with and without rows that change its scale.
"""

from __future__ import annotations

from typing import Any

import torch

from cgbundle.format.size_expressions import names

from ..model.user_code import place
from .prepared import Prepared

SHAPE_ONLY = frozenset({"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"})
"""Operations that take a tensor for its dtype and device alone."""


def joined(prepared: Prepared, name: str) -> str:
    """ "" or a sentence about the first operation that joins rows of dimension `name`.

    It takes tensors with an axis of the dimension and gives one without: what it gives depends on all rows, or on one of them.
    """
    user = set(prepared.programs.first.graph_signature.user_inputs)
    symbols: set[Any] = set()
    values = [node.meta["val"] for node in prepared.programs.first.graph.nodes if node.op == "placeholder" and node.name in user]
    for value, spec in zip(values, prepared.signature.inputs, strict=True):
        for actual, size in zip(value.shape, spec.shape, strict=True):
            if name in names(size) and isinstance(actual, torch.SymInt):
                symbols |= actual.node.expr.free_symbols
    for node in prepared.programs.first.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or _has(value, symbols):
            continue
        taken = [source.meta.get("val") for source in node.all_input_nodes]
        if node.target.__name__.partition(".")[0] not in SHAPE_ONLY and any(_has(each, symbols) for each in taken):
            where, line = place(node)
            at = f" ({where}: {line})" if where else ""
            return f"{node.target.__name__.partition('.')[0]} joins what lies along {name}{at}"
    return ""


def _has(value: Any, symbols: set[Any]) -> bool:
    """Whether one of a tensor's sizes depends on the symbols."""
    if not isinstance(value, torch.Tensor):
        return False
    return any(isinstance(size, torch.SymInt) and size.node.expr.free_symbols & symbols for size in value.shape)
