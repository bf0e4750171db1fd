"""Copies the operations of a graph into the graph that calls it by a higher-order operator."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from ...model.user_code import place

Results = Sequence[Any]
"""The nodes, or constants, that replace an operator's results."""


def body_of(module: GraphModule, node: Any) -> GraphModule | None:
    """Returns the graph that a get_attr node refers to, or None."""
    body = getattr(module, str(node.target), None) if isinstance(node, Node) and node.op == "get_attr" else None
    return body if isinstance(body, GraphModule) else None


def inlined(first: int, operands: int) -> Callable[[GraphModule, Node], Results | None]:
    """Returns a function that expands an operator.  Argument number `first` is its graph.  Arguments from number `operands` on are
    the graph's inputs."""

    def expand(module: GraphModule, node: Node) -> Results | None:
        body = body_of(module, node.args[first])
        return None if body is None else inline(module, body, tree_leaves(node.args[operands:]), node)

    return expand


def inline(module: GraphModule, body: GraphModule, operands: Sequence[Any], caller: Node) -> Results | None:
    """Copies the body's nodes with these operands to the graph's insertion point.  Returns the results, or None if the number of
    operands is wrong."""
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(operands):
        return None
    copies: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    for node in body.graph.nodes:
        if node.op == "output":
            return [copies[leaf] if isinstance(leaf, Node) else leaf for leaf in tree_leaves(node.args[0])]
        if node.op == "get_attr":
            name = add_attribute(module, str(node.target).replace(".", "_"), operator.attrgetter(node.target)(body))
            copies[node] = module.graph.get_attr(name)
            copies[node].meta = dict(node.meta)
        elif node not in copies:
            copies[node] = module.graph.node_copy(node, lambda operand: copies[operand])
            copies[node].meta["stack_trace"] = node.meta.get("stack_trace") if place(node)[0] else caller.meta.get("stack_trace")
            copies[node].meta.setdefault("nn_module_stack", caller.meta.get("nn_module_stack", {}))
    raise AssertionError("a graph without an output")


def add_attribute(module: GraphModule, name: str, value: Any) -> str:
    """Adds `value` as an attribute of the module.  Returns its name: `name`, with a number if that is in use."""
    number, free = 0, name
    while hasattr(module, free):
        number, free = number + 1, f"{name}_{number}"
    setattr(module, free, value)
    return free


def add_call(module: GraphModule, caller: Node, target: Any, *args: Any) -> Node:
    """Adds a call of an operator at the graph's insertion point, with its fake value and the source line of `caller`."""
    node = module.graph.call_function(target, args)
    values = map_aggregate(args, lambda arg: arg.meta["val"] if isinstance(arg, Node) else arg)
    with fake_mode(caller):
        node.meta["val"] = target(*values)
    node.meta["stack_trace"] = caller.meta.get("stack_trace")
    node.meta["nn_module_stack"] = caller.meta.get("nn_module_stack", {})
    return node


def fake_mode(node: Node) -> Any:
    """Returns the FakeTensorMode of a node's arguments, or None if it takes no tensor."""
    values = [leaf.meta.get("val") for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    modes = [value.fake_mode for value in tree_leaves(values) if hasattr(value, "fake_mode")]
    return modes[0] if modes else None
