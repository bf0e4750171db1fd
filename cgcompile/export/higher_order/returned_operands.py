"""Branches and loops whose bodies give an operand itself, or one tensor twice.  Eager PyTorch takes them (`lambda y: y`); the
functional form of a program wants that every result has memory of its own.

Private interface (torch 2.11, 2.13): `_cdata`, which fake tensors that share memory have in common.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from .conditionals import bodies, is_conditional


def copy_shared_results(module: GraphModule) -> None:
    """Changes the bodies of `torch.cond` and `torch.while_loop` in a graph, at any depth.

    A result that shares memory with an operand, or with another result, becomes a copy.
    """
    for part in [each for each in module.modules() if isinstance(each, GraphModule)]:
        for node in part.graph.nodes:
            for body in bodies(node, part) if is_conditional(node) else ():
                _copy(body, node)


def _copy(body: GraphModule, caller: Node) -> None:
    taken = {_memory(node) for node in body.graph.find_nodes(op="placeholder")} - {None}
    output = body.graph.output_node()
    results, structure = tree_flatten(output.args[0])
    made = []
    for result in results:
        memory = _memory(result)
        made.append(_copied(body, output, result, caller) if memory in taken else result)
        taken |= {memory} - {None}
    if made != results:
        output.args = (tree_unflatten(made, structure),)
        body.recompile()


def _memory(value: Any) -> int | None:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None


def _copied(body: GraphModule, output: Node, result: Node, caller: Node) -> Node:
    with body.graph.inserting_before(output):
        made = body.graph.call_function(torch.ops.aten.clone.default, (result,))
    made.meta["val"] = result.meta["val"].clone()
    for key in ("stack_trace", "nn_module_stack"):
        if found := result.meta.get(key) or caller.meta.get(key):
            made.meta[key] = found
    return made
