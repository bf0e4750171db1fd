"""Replaces higher-order operators of an exported program by their operations: operators that call a graph once (gradient mode,
autocast, checkpoint), loops with a fixed number of iterations, and flex_attention.  Keeps operators that depend on data (cond,
while_loop), and scans along an axis of a declared dimension.

Private interfaces (torch 2.11, 2.13): the order of these operators' arguments, and their names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ...model.user_code import place
from ..torch_program import copied_graph, with_graph
from .flex_attention import flex_attention
from .inline import Results, inlined
from .loops import map_rows, scan
from .retrace import traced_again

AUTOCAST = "wrap_with_autocast"

VMAP = "torch._functorch.predispatch"
"""The module of the functions that torch.export leaves in the graph for torch.vmap."""


def expanded(program: ExportedProgram) -> ExportedProgram:
    """Returns `program` without these operators, or the same program if it has none.  An operator whose stack trace has no line of
    the model gets that of the nearest node that uses its result."""
    if any(_higher_order(node) for node in program.graph.nodes):
        program = _without_loops(program)
    nodes = [node for module in _graphs(program.graph_module) for node in module.graph.nodes]
    modes = any(_name(node) == AUTOCAST or getattr(node.target, "__module__", "") == VMAP for node in nodes)
    return traced_again(program) if modes else program


def _without_loops(program: ExportedProgram) -> ExportedProgram:
    root = copied_graph(program)
    before = _returned(root)
    _expand(root)
    renamed = {old: new for old, new in zip(before, _returned(root), strict=True) if old != new}
    return with_graph(program, root, renamed)


def _returned(root: GraphModule) -> list[str]:
    return [str(leaf) for leaf in tree_leaves(root.graph.output_node().args[0])]


def _graphs(root: GraphModule) -> list[GraphModule]:
    return [module for module in root.modules() if isinstance(module, GraphModule)]


def _higher_order(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _name(node: Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else ""


def _expand(module: GraphModule) -> None:
    for child in module.children():
        if isinstance(child, GraphModule):
            _expand(child)
    for node in [node for node in module.graph.nodes if _higher_order(node)]:
        node.meta["stack_trace"] = _trace(node)
        expand_operator = EXPANSIONS.get(_name(node))
        has_tuple = isinstance(node.meta.get("val"), tuple | list)
        if expand_operator is None or (has_tuple and any(user.target is not operator.getitem for user in node.users)):
            continue
        with module.graph.inserting_before(node):
            results = expand_operator(module, node)
        if results is None:
            continue
        if has_tuple:
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                module.graph.erase_node(user)
        else:
            node.replace_all_uses_with(results[0])
        module.graph.erase_node(node)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    used = {str(node.target).partition(".")[0] for node in module.graph.find_nodes(op="get_attr")}
    for name, child in list(module.named_children()):
        if isinstance(child, GraphModule) and name not in used:
            delattr(module, name)  # delete_all_unused_submodules would also remove submodules that nested modules use
    module.recompile()


def _trace(node: Node) -> str:
    """Returns the stack trace of a node, or, if this has no line of the model, that of the nearest node that uses its result."""
    reached = [node]
    for candidate in reached:
        if place(candidate)[0] or len(reached) > 64:
            return str(candidate.meta.get("stack_trace") or "")
        reached += [user for user in candidate.users if user not in reached]
    return str(node.meta.get("stack_trace") or "")


EXPANSIONS: Mapping[str, Callable[[GraphModule, Node], Results | None]] = {
    "wrap_with_set_grad_enabled": inlined(1, 2),
    "tag_activation_checkpoint": inlined(0, 1),
    "wrap": inlined(0, 1),
    "hints_wrapper": inlined(0, 1),
    "invoke_subgraph": inlined(0, 2),
    "scan": scan,
    "map_impl": map_rows,
    "flex_attention": flex_attention,
}
"""Operator's name -> function that adds its operations at the graph's insertion point, and returns its results."""
