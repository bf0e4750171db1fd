"""Higher-order operators that are no more than their operations, taken out of an exported program: what calls a graph once (under
another gradient mode, under autocast, as a checkpoint), loops with a fixed number of turns, and flex_attention.  Those that decide
while they run (cond, while_loop) stay.  So do scans along an axis whose size is declared.

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
"""The module of the functions that export leaves of torch.vmap."""


def expanded(program: ExportedProgram) -> ExportedProgram:
    """`program` without the operators above; the same one where it has none.  Operators of torch that were traced apart have the
    user's line of what takes their results."""
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
        how = EXPANSIONS.get(_name(node))
        several = isinstance(node.meta.get("val"), tuple | list)
        if how is None or (several and any(user.target is not operator.getitem for user in node.users)):
            continue
        with module.graph.inserting_before(node):
            results = how(module, node)
        if results is None:
            continue
        if several:
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
            delattr(module, name)  # delete_all_unused_submodules takes those that a module below uses, too
    module.recompile()


def _trace(node: Node) -> str:
    """The stack trace of a node; where that is all torch's, of the nearest node that uses it."""
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
"""By the operator's name: what takes it out, at the graph's insertion point."""
