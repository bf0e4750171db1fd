"""Facts about data-dependent sizes in a straight-line program: equal values, and lower bounds from the answers of its path."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...model.tracing.way import ASKED
from .axes import data_size

aten = torch.ops.aten

COMPARISONS: Mapping[str, Any] = {"eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge}


def alike(graph: Graph) -> dict[Node, Node]:
    """Maps each pure node to the first node with the same computation.  The graph must have no in-place writes."""
    first: dict[Hashable, Node] = {}
    same: dict[Node, Node] = {}
    for node in graph.nodes:
        target = node.target
        pure = getattr(target, "namespace", "") == "aten" and not node.is_impure() and not target._schema.is_mutable
        if node.op != "call_function" or not (pure or getattr(target, "__module__", "") == "_operator"):
            continue
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            continue
        args = map_arg((node.args, node.kwargs), lambda argument: same.get(argument, argument))
        same[node] = first.setdefault((target, repr(args)), node)
    return same


def lowest(graph: Graph, answers: Sequence[bool]) -> dict[Any, int]:
    """Returns lower bounds of data-dependent sizes on a path with these answers, by symbol.  Missing symbols have the bound 0."""
    low: dict[Any, int] = {}
    markers = graph.find_nodes(op="call_function", target=ASKED)
    for marker, answer in zip(markers, answers, strict=True):
        fact = _size_comparison(marker.args[0][0])
        if fact is None:
            continue
        fact = fact if answer else sympy.Not(fact)
        (symbol,) = fact.free_symbols
        while fact.subs(symbol, low.get(symbol, 0)) == False and low.get(symbol, 0) < MOST:  # noqa: E712  may be sympy's False
            low[symbol] = low.get(symbol, 0) + 1
    return low


MOST = 64
"""Largest lower bound of a size that `lowest` finds."""


def holds(condition: Any, low: Mapping[Any, int]) -> bool:
    """Whether a condition is true for all sizes of at least `low`."""
    values = {symbol: low.get(symbol, 0) + sympy.Dummy(integer=True, nonnegative=True) for symbol in condition.free_symbols}
    return bool(condition.subs(values) == True)  # noqa: E712  may be sympy's True


def _size_comparison(node: Node) -> Any:
    """Returns the expression of a node that compares one data-dependent size with a number; None for any other node."""
    name = node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
    if name not in COMPARISONS:
        return None
    left, right = [_number(argument) for argument in node.args]
    if left is None or right is None:
        return None
    comparison = COMPARISONS[name](left, right)
    return comparison if len(comparison.free_symbols) == 1 else None


def _number(argument: Any) -> Any:
    """Returns the expression of a whole number, or of a size converted to a tensor; None for another value."""
    if isinstance(argument, int | float):
        return sympy.Integer(argument) if argument == int(argument) else None
    while isinstance(argument, Node) and argument.target in (aten._to_copy.default, aten.to.dtype):
        argument = argument.args[0]
    if not isinstance(argument, Node) or argument.target is not aten.scalar_tensor.default:
        return None
    return data_size(argument.args[0].meta["val"]) if isinstance(argument.args[0], Node) else _number(argument.args[0])
