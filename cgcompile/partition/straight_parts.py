"""Edits the results of a straight part's module (`blocks.Straight`), and finds the tensors that it writes to."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .node_kinds import is_view, writes_to


def end_with_copies(module: GraphModule, targets: Sequence[int]) -> None:
    """Replaces the last results of a module by copies into the inputs at the positions `targets`.  A result that is one of these
    inputs or a view of it is cloned first, because results have the values from before the copies."""
    if not targets:
        return
    (output,) = module.graph.find_nodes(op="output")
    destinations = [module.graph.find_nodes(op="placeholder")[position] for position in targets]
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for number, result in enumerate(results):
            if isinstance(result, Node) and _origin(result) in destinations:
                results[number] = module.graph.call_function(torch.ops.aten.clone.default, (result,))
        remaining, new = results[: -len(destinations)], results[-len(destinations) :]
        for destination, result in zip(destinations, new, strict=True):
            module.graph.call_function(torch.ops.aten.copy_.default, (destination, result))
    output.args = (tuple(remaining),)
    module.recompile()


def keep_outputs(module: GraphModule, places: Sequence[int]) -> None:
    """Removes all results of a module except those at the positions `places`."""
    (output,) = module.graph.find_nodes(op="output")
    output.args = (tuple([output.args[0][place] for place in places]),)
    module.recompile()


def written_tensors(module: GraphModule, arguments: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors that a module writes to, among `arguments` and the tensors that are its attributes."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    tensors = {**dict(zip(names, arguments, strict=True)), **held_tensors(module)}
    sources = [_origin(target).name for node in module.graph.nodes for target in writes_to(node)]
    return [tensors[name] for name in dict.fromkeys(sources) if name in tensors]


def _origin(node: Node) -> Node:
    """Returns the tensor of which a node is a view, or the node."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        node = node.all_input_nodes[0]
    return node


def held_tensors(module: GraphModule) -> dict[str, Tensor]:
    """Returns the attribute tensors that the graph of a module uses, by the names of the nodes."""
    attributes = {node.name: operator.attrgetter(str(node.target))(module) for node in module.graph.find_nodes(op="get_attr")}
    return {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
