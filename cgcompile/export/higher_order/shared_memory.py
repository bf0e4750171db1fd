"""Copies operands and results of branches and loops that share memory.  A body may return an operand itself, or one tensor twice.
Two operands may be one tensor, or a view and its base.  Eager PyTorch accepts this (`lambda y: y`, `(i, zeros, zeros)`), but in the
functional form of a program, operands and results may not share memory.

Private interfaces (torch 2.11, 2.13): the storage's `_cdata`, which is equal for fake tensors that share memory, and
`torch._C._dispatch_has_kernel_for_dispatch_key`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from .conditionals import WHILE, bodies, higher_order, is_conditional


def copy_shared(module: GraphModule) -> None:
    """Adds copies to every `torch.cond` and `torch.while_loop` of a graph, at any depth, in place.

    Copies an operand that shares memory with an earlier one.  Copies a result of a body that shares memory with an operand or an
    earlier result.
    """
    for part in [submodule for submodule in module.modules() if isinstance(submodule, GraphModule)]:
        for node in [node for node in part.graph.nodes if is_conditional(node)]:
            _copy_operands(part, node)
            for body in bodies(node, part):
                _copy_results(body, node)


def _copy_operands(part: GraphModule, node: Node) -> None:
    operands, structure = tree_flatten(node.args)
    used: set[int | None] = set()
    new_operands = []
    for number, operand in enumerate(operands):
        # `torch.cond` reads its first argument, the predicate, before a body runs
        memory = _memory(operand) if number or higher_order(node) == WHILE else None
        new_operands.append(_copied(part, node, operand, node) if memory in used else operand)
        used |= {memory} - {None}
    if new_operands != operands:
        node.args = tree_unflatten(new_operands, structure)
        part.recompile()


def _copy_results(body: GraphModule, caller: Node) -> None:
    used = {_memory(node) for node in body.graph.find_nodes(op="placeholder")} - {None}
    output = body.graph.output_node()
    results, structure = tree_flatten(output.args[0])
    new_results = []
    for result in results:
        memory = _memory(result)
        new_results.append(_copied(body, output, result, caller) if memory in used else result)
        used |= {memory} - {None}
    if new_results != results:
        output.args = (tree_unflatten(new_results, structure),)
        body.recompile()


def _memory(value: Any) -> int | None:
    while isinstance(value, Node) and (source := _viewed(value)) is not None:
        value = source  # the fake tensor of a view may have another storage
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None


def _viewed(node: Node) -> Node | None:
    """Returns the node of which a node is certainly a view, or None."""
    call = node.args[0] if node.target is operator.getitem else node
    target = call.target if isinstance(call, Node) else None
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or not target._schema.returns:
        return None
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    if composite or target._schema.returns[0].alias_info is None:
        return None  # composite operators may return a copy
    return call.args[0] if call.args and isinstance(call.args[0], Node) else None


def _copied(part: GraphModule, before: Node, value: Node, caller: Node) -> Node:
    with part.graph.inserting_before(before):
        copy_node = part.graph.call_function(torch.ops.aten.clone.default, (value,))
    copy_node.meta["val"] = value.meta["val"].clone()
    for key in ("stack_trace", "nn_module_stack"):
        if metadata := value.meta.get(key) or caller.meta.get(key):
            copy_node.meta[key] = metadata
    return copy_node
