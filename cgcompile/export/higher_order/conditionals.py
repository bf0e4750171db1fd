"""Finds which branches and loops on data can be conditional nodes of a CUDA graph.

Private interface (torch 2.11, 2.13): `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ...model.devices.markers import marker
from ...model.user_code import place

COND, WHILE = "cond", "while_loop"

CONTROL_FLOW = frozenset({COND, WHILE, "map", "map_impl", "scan"})
"""Higher-order operators with control flow.  `associative_scan` is not one, because Inductor compiles it to a kernel."""


def is_conditional(node: Node) -> bool:
    """Whether a node is `torch.cond` or `torch.while_loop`."""
    return higher_order(node) in (COND, WHILE)


def higher_order(node: Node) -> str:
    """Returns the name of a node's higher-order operator, or ""."""
    return str(node.target.name()) if isinstance(node.target, torch._ops.HigherOrderOperator) else ""


def bodies(node: Node, module: GraphModule) -> Iterator[GraphModule]:
    """Yields the graphs that a higher-order operator calls, without those nested in them."""
    for source in node.all_input_nodes:
        body = getattr(module, str(source.target)) if source.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield body


def obstacle(node: Node, module: GraphModule) -> str:
    """Returns the reason why a branch or loop cannot be a conditional node of a CUDA graph, with the operation and the user's line,
    or "".  Bodies of conditional nodes have the same limits as CUDA graphs."""
    if not is_conditional(node):
        return "control flow" if higher_order(node) in CONTROL_FLOW else ""
    predicate, *rest = node.args
    carried = rest[1] if higher_order(node) == WHILE else (predicate,)
    if not all(isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), torch.Tensor) for leaf in tree_leaves(carried)):
        return f"{'a carried value' if higher_order(node) == WHILE else 'the condition'} is a Python number, not a tensor"
    if _unbacked(node.meta.get("val")):
        return "its result's size depends on data"
    for body in bodies(node, module):
        for inner in body.graph.nodes:
            if reason := _inner_obstacle(inner, body):
                return reason
    return ""


def _inner_obstacle(inner: Node, body: GraphModule) -> str:
    if inner.op == "output":
        constants = [leaf for leaf in tree_leaves(inner.args[0]) if not isinstance(leaf, Node)]
        return "a body returns a constant" if constants else ""
    if marker(inner) == "to_host":
        return f"a copy to the host inside it{_at(inner)}"
    if inner.op == "call_function" and _unbacked(inner.meta.get("val")):
        return f"a value inside it depends on data{_at(inner)}"
    if is_conditional(inner):
        return obstacle(inner, body)
    if higher_order(inner) in CONTROL_FLOW or (higher_order(inner) and any(map(_has_control_flow, bodies(inner, body)))):
        return f"control flow of another kind inside it{_at(inner)}"
    return ""


def _at(node: Node) -> str:
    """Returns the operation and the user's line as text: " (nonzero, model.py:12)"."""
    packet = getattr(node.target, "overloadpacket", None)
    name = packet.__name__ if packet is not None and not marker(node) else higher_order(node)
    details = ", ".join(filter(None, [name.removesuffix("_impl"), place(node)[0]]))
    return f" ({details})" if details else ""


def _has_control_flow(module: GraphModule) -> bool:
    return any(
        higher_order(node) in CONTROL_FLOW or any(map(_has_control_flow, bodies(node, module))) for node in module.graph.nodes
    )


def _unbacked(value: Any) -> bool:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)]
    return any(bool(free_unbacked_symbols(leaf)) for leaf in leaves)
