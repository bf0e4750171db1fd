"""The module of a straight part: what it gives, and what it writes to.  Pure FX."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .node_kinds import is_view, writes_to


def end_with_copies(module: GraphModule, targets: Sequence[int]) -> list[int]:
    """Makes the last results of a module copies to the inputs at the positions `targets`.  Where a result lies in one of these, it
    is copied elsewhere first: all results are those of the values before.

    Returns which of the copies remain to be done, whose values stay results: the `mistakable` ones."""
    if not targets:
        return []
    (output,) = module.graph.find_nodes(op="output")
    places = [module.graph.find_nodes(op="placeholder")[place] for place in targets]
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for number, result in enumerate(results):
            if isinstance(result, Node) and _origin(result) in places:
                results[number] = module.graph.call_function(torch.ops.aten.clone.default, (result,))
        kept, new = results[: -len(places)], results[-len(places) :]
        left = mistakable(places, new)
        for number, (place, result) in enumerate(zip(places, new, strict=True)):
            if number not in left:
                module.graph.call_function(torch.ops.aten.copy_.default, (place, result))
    output.args = ((*kept, *[new[number] for number in left]),)
    module.recompile()
    return left


def mistakable(places: Sequence[Node], values: Sequence[Any]) -> list[int]:
    """Which of the values, that are to be written to inputs, a compiler may take for another of these inputs.  Inductor takes
    operations out that change nothing, copies too, and then writes an input before it reads it for another one (torch 2.11 and
    2.13, `remove_noop_ops` in torch/_inductor/fx_passes/post_grad.py)."""
    pairs = enumerate(zip(places, values, strict=True))
    return [number for number, (place, value) in pairs if _simple_sources(value) & ({*places} - {place})]


SIMPLE = frozenset({"clone", "contiguous", "to", "_to_copy", "add", "sub", "mul", "div", "pow", "copy", "cat", "repeat", "where"})
"""Operations beside views that may change nothing, depending on what they are given."""


def _simple_sources(node: Any) -> set[Node]:
    """The inputs that a value may be, for all that a compiler can find out about its operations."""
    found: set[Node] = set()
    waiting = [node] if isinstance(node, Node) else []
    while waiting:
        each = waiting.pop()
        packet = getattr(each.target, "overloadpacket", None)
        if each.op == "placeholder":
            found.add(each)
        elif is_view(each) or each.target is operator.getitem or getattr(packet, "__name__", "") in SIMPLE:
            waiting += each.all_input_nodes
    return found


def keep_outputs(module: GraphModule, places: Sequence[int]) -> None:
    """Leaves a module the results at these places."""
    (output,) = module.graph.find_nodes(op="output")
    output.args = (tuple([output.args[0][place] for place in places]),)
    module.recompile()


def written_tensors(module: GraphModule, given: Sequence[Any]) -> list[Tensor]:
    """What a module writes to, of the arguments `given` and of its own tensors."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    held = {**dict(zip(names, given, strict=True)), **held_tensors(module)}
    sources = [_origin(each).name for node in module.graph.nodes for each in writes_to(node)]
    return [held[each] for each in dict.fromkeys(sources) if each in held]


def _origin(node: Node) -> Node:
    """What a view is a view of."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        node = node.all_input_nodes[0]
    return node


def held_tensors(module: GraphModule) -> dict[str, Tensor]:
    """The tensors of a module that its graph uses, by the names of the nodes."""
    held = {node.name: operator.attrgetter(str(node.target))(module) for node in module.graph.find_nodes(op="get_attr")}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}
