"""The module of a straight part: its results, and the tensors that it writes to.  Pure FX."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .node_kinds import is_view, writes_to


def end_with_copies(module: GraphModule, targets: Sequence[int]) -> None:
    """Replaces the last results of a module by copies into the inputs at the positions `targets`.  A result in the memory of these
    inputs is cloned first, because results have the values from before the copies."""
    if not targets:
        return
    (output,) = module.graph.find_nodes(op="output")
    places = [module.graph.find_nodes(op="placeholder")[place] for place in targets]
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for number, result in enumerate(results):
            if isinstance(result, Node) and _origin(result) in places:
                results[number] = module.graph.call_function(torch.ops.aten.clone.default, (result,))
        remaining, new = results[: -len(places)], results[-len(places) :]
        for place, result in zip(places, new, strict=True):
            module.graph.call_function(torch.ops.aten.copy_.default, (place, result))
    output.args = (tuple(remaining),)
    module.recompile()


def keep_outputs(module: GraphModule, places: Sequence[int]) -> None:
    """Removes all results of a module but those at these positions."""
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
    """The tensor that a view is a view of."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        node = node.all_input_nodes[0]
    return node


def held_tensors(module: GraphModule) -> dict[str, Tensor]:
    """The attribute tensors of a module that its graph uses, by the names of the nodes."""
    attributes = {node.name: operator.attrgetter(str(node.target))(module) for node in module.graph.find_nodes(op="get_attr")}
    return {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
