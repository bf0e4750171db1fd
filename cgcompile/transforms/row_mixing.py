"""Which operation joins the rows of a declared dimension: read off the program, as running examples may not show it.

A softmax of large numbers, say, is the same with and without rows that change its scale.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from cgbundle.format.size_expressions import names

from ..model.user_code import place
from .prepared import Prepared

SHAPE_ONLY = frozenset({"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"})
"""Operations that take a tensor for its dtype and device alone."""


def joined(prepared: Prepared, name: str, position: int) -> str:
    """ "" or a sentence about the first operation that joins rows of dimension `name`, number `position` of an int_key.

    It takes tensors with an axis of the dimension and gives one without: what it gives depends on all rows, or on one of them.
    Where every int_key has its own program, what has such an axis shows by two programs of the same operations.
    """
    if prepared.programs.dynamic:
        return _first_joining(prepared.programs.first, _growing(prepared, name), name)
    for key, program in prepared.programs.by_key.items():
        rest = key[:position], key[position + 1 :]
        others = [
            other
            for another, other in prepared.programs.by_key.items()
            if another != key and (another[:position], another[position + 1 :]) == rest
        ]
        alike = next((other for other in others if _targets(other) == _targets(program)), None)
        if alike is None:
            return f"operations differ between the sizes of {name}, so that what joins them cannot be read off"
        pairs = zip(program.graph.nodes, alike.graph.nodes, strict=True)
        if why := _first_joining(program, {node for node, twin in pairs if _shapes(node) != _shapes(twin)}, name):
            return why
    return ""


def _growing(prepared: Prepared, name: str) -> set[Node]:
    """The nodes of a dynamic program with an axis of the dimension."""
    program = prepared.programs.first
    user = set(program.graph_signature.user_inputs)
    symbols: set[Any] = set()
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in user]
    for value, spec in zip(values, prepared.signature.inputs, strict=True):
        for actual, size in zip(value.shape, spec.shape, strict=True):
            if name in names(size) and isinstance(actual, torch.SymInt):
                symbols |= actual.node.expr.free_symbols
    return {node for node in program.graph.nodes if _has(node.meta.get("val"), symbols)}


def _targets(program: ExportedProgram) -> list[str]:
    return [f"{node.op} {node.target}" if node.op == "call_function" else node.op for node in program.graph.nodes]


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _first_joining(program: ExportedProgram, growing: Set[Node], name: str) -> str:
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or node in growing:
            continue
        if node.target.__name__.partition(".")[0] not in SHAPE_ONLY and any(source in growing for source in node.all_input_nodes):
            where, line = place(node)
            at = f" ({where}: {line})" if where else ""
            return f"{node.target.__name__.partition('.')[0]} joins what lies along {name}{at}"
    return ""


def _has(value: Any, symbols: set[Any]) -> bool:
    """Whether one of a tensor's sizes depends on the symbols."""
    if not isinstance(value, torch.Tensor):
        return False
    return any(isinstance(size, torch.SymInt) and size.node.expr.free_symbols & symbols for size in value.shape)
