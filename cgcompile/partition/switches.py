"""Branches inside of each other that compare one value with constants: the bodies of a switch.  Pure FX.

Private interfaces (torch 2.11, 2.13): the order of the arguments of `torch.cond` as an operator.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ..export.higher_order.conditionals import COND, higher_order


class Case(NamedTuple):
    """A body of a switch: the constant that chooses it, None for the last one; its graph before and after the copy; and what it
    takes, in terms of the graph that the switch is in."""

    constant: Any
    source: GraphModule
    module: GraphModule
    operands: tuple[Any, ...]


SWITCH_FROM, SWITCH_TO = 3, 256
"""Bodies of a switch: two are a branch, and a byte tells 256 apart."""


def cases_of(source: GraphModule, module: GraphModule, node: Node) -> list[Case]:
    """The bodies of a switch that begins with a node; [] where it is none."""
    cases: list[Case] = []
    value: Any = None
    bindings: dict[Node, Any] = {}
    while higher_order(node) == COND:
        compared, true, false, operands = node.args
        if not _is_comparison(compared) or (cases and bindings.get(compared.args[0]) is not value):
            break
        value = compared.args[0] if not cases else value
        case_operands = tuple([bindings.get(operand, operand) if isinstance(operand, Node) else operand for operand in operands])
        names = str(true.target), str(false.target)
        cases.append(Case(compared.args[1], getattr(source, names[0]), getattr(module, names[0]), case_operands))
        source, module = getattr(source, names[1]), getattr(module, names[1])
        bindings = dict(zip(module.graph.find_nodes(op="placeholder"), case_operands, strict=True))
        inner = _only_conditional(module)
        if inner is None:
            break
        node = inner
    cases.append(Case(None, source, module, tuple(bindings.values())))
    return cases if SWITCH_FROM <= len(cases) <= SWITCH_TO else []


def _is_comparison(value: Any) -> bool:
    """Whether a value is that of a comparison with a constant."""
    return isinstance(value, Node) and value.target is torch.ops.aten.eq.Scalar and isinstance(value.args[0], Node)


def _only_conditional(module: GraphModule) -> Node | None:
    """The branch of a graph that does nothing beside it and the comparison that decides it, and gives its results as they are."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    (output,) = module.graph.find_nodes(op="output")
    outputs = tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    if len(nodes) != 2 or higher_order(nodes[1]) != COND or nodes[1].args[0] is not nodes[0]:
        return None
    places = [leaf.args[1] if isinstance(leaf, Node) and leaf.args and leaf.args[0] is nodes[1] else None for leaf in outputs]
    count = len(tree_leaves(nodes[1].meta["val"])) if "val" in nodes[1].meta else len(places)
    return nodes[1] if places == list(range(count)) else None


def choice_of(graph: Graph, compared: Node, cases: Sequence[Case]) -> Node:
    """The number of the first case whose constant the value is, else the last one's, as a byte."""
    aten, value = torch.ops.aten, compared.args[0]
    choice: Any = len(cases) - 1
    for number, case in reversed(list(enumerate(cases[:-1]))):
        equal = graph.call_function(aten.eq.Scalar, (value, case.constant))
        where = aten.where.Scalar if isinstance(choice, int) else aten.where.ScalarSelf
        choice = graph.call_function(where, (equal, number, choice))
    return graph.call_function(aten._to_copy.default, (choice,), {"dtype": torch.uint8})
