"""Converts nested `torch.cond` operators that compare one value with constants to one switch.

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
    """A body of a switch.  It runs if the value equals `constant`; the last body has None and runs otherwise.  `source` is its
    graph in the original program, `module` in the copy that `blocks` edits.  `operands` are its inputs: values of the graph
    that contains the switch."""

    constant: Any
    source: GraphModule
    module: GraphModule
    operands: tuple[Any, ...]


MIN_CASES, MAX_CASES = 3, 256
"""The smallest and the largest number of bodies of a switch.  Two bodies are a branch.  The number of the body is a uint8."""


def cases_of(source: GraphModule, module: GraphModule, node: Node) -> list[Case]:
    """Returns the bodies of the switch whose outermost `torch.cond` is `node`, or [] if there is none."""
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
    return cases if MIN_CASES <= len(cases) <= MAX_CASES else []


def _is_comparison(value: Any) -> bool:
    """Whether a value is the result of a comparison with a constant."""
    return isinstance(value, Node) and value.target is torch.ops.aten.eq.Scalar and isinstance(value.args[0], Node)


def _only_conditional(module: GraphModule) -> Node | None:
    """Returns the `torch.cond` of a graph that consists of a comparison and this operator, and that returns exactly its results.
    Returns None for other graphs."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    (output,) = module.graph.find_nodes(op="output")
    outputs = tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    if len(nodes) != 2 or higher_order(nodes[1]) != COND or nodes[1].args[0] is not nodes[0]:
        return None
    places = [leaf.args[1] if isinstance(leaf, Node) and leaf.args and leaf.args[0] is nodes[1] else None for leaf in outputs]
    count = len(tree_leaves(nodes[1].meta["val"])) if "val" in nodes[1].meta else len(places)
    return nodes[1] if places == list(range(count)) else None


def choice_of(graph: Graph, compared: Node, cases: Sequence[Case]) -> Node:
    """Adds nodes that compute the number of the case to run, as uint8.  It is the first case whose constant equals the value, else
    the last case."""
    aten, value = torch.ops.aten, compared.args[0]
    choice: Any = len(cases) - 1
    for number, case in reversed(list(enumerate(cases[:-1]))):
        equal = graph.call_function(aten.eq.Scalar, (value, case.constant))
        where = aten.where.Scalar if isinstance(choice, int) else aten.where.ScalarSelf
        choice = graph.call_function(where, (equal, number, choice))
    return graph.call_function(aten._to_copy.default, (choice,), {"dtype": torch.uint8})
