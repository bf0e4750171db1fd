"""Replaces operators of an exported program by their operations: higher-order ones that call a graph once (gradient mode, autocast,
checkpoint), loops with a fixed number of iterations, flex_attention, composite operators of other libraries, and grouped matrix
products.  Keeps operators that depend on data (cond, while_loop), and scans along an axis of a declared dimension.

Private interfaces (torch 2.11, 2.13): the order of these operators' arguments, and their names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ...model.user_code import place
from ..torch_program import copied_graph, with_graph
from .flex_attention import flex_attention
from .inline import Results, inlined
from .loops import map_rows, scan
from .retrace import traced_again

aten = torch.ops.aten

PYTORCH = frozenset({"aten", "prim", "prims", "cgcompile"})
"""Namespaces of operators that compilers know."""

GROUPED = "transformers::grouped_mm_fallback"
"""Operator of transformers (5.17, 5.23) for devices without a grouped product.  It reads the groups' ends on the host."""

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


# --- operators of other libraries, grouped products, resized tensors --------------------------------------------------


def without_composites(program: ExportedProgram) -> ExportedProgram:
    """Returns the program with composite operators of other libraries, and grouped products, replaced by PyTorch operators.

    torch.export keeps calls of such operators (for example torchao's quantization), which need the library to run."""
    calls = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    others = [op for op in calls if op.namespace not in PYTORCH]
    table = torch.export.default_decompositions() if others else {}
    composites: dict[Any, Callable[..., Any]] = {op: table[op] for op in others if op in table}
    composites |= {op: grouped_product for op in calls if op.name() == GROUPED or op.name() == "aten::_grouped_mm"}
    return program.run_decompositions(composites) if composites else program


def give_sizes_at_once(program: ExportedProgram) -> None:
    """Replaces a tensor that is created empty and then resized (`input.new().resize_as_(x)`, torch.nn.CrossMapLRN2d) by one with
    the final size, since torch (2.11, 2.13) cannot functionalize views of a resized tensor.  The size is a constant, since
    torch.export specializes sizes of resized tensors."""
    for node in list(program.graph.nodes):
        operand = node.args[0] if node.target in (aten.resize_as_.default, aten.resize_.default) else None
        if not isinstance(operand, Node) or operand.target is not aten.empty.memory_format or list(operand.args[0]) != [0]:
            continue
        if next(user for user in program.graph.nodes if user in operand.users) is not node:  # another node reads the empty tensor
            continue
        size = node.args[1].meta["val"].shape if isinstance(node.args[1], Node) else node.args[1]
        with program.graph.inserting_before(node):
            sized = program.graph.call_function(operand.target, (list(size),), dict(operand.kwargs))
        sized.meta = dict(node.meta)
        for old_node in (node, operand):
            old_node.replace_all_uses_with(sized)
            program.graph.erase_node(old_node)


FEW = 16
"""Up to this many groups are multiplied one after the other, which needs less memory than one batched product."""


def grouped_product(
    rows: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiplies rows (s, k) by the matrix of their group (g, k, n); the result is (s, n).  `offs` (g): the row after each group.
    Rows after the last group become 0.

    PyTorch's operator reads `offs` on the host unless the operands are bfloat16 on a GPU of compute capability 9 or more; then this
    returns NotImplemented.  All rows are multiplied by every matrix: the work grows with the groups, but no size depends on data.
    """
    capable = rows.dtype == torch.bfloat16 and rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    if rows.dim() != 2 or matrices.dim() != 3 or offs is None or bias is not None or capable:
        return NotImplemented
    ends = offs.to(torch.int64)
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    place = torch.arange(rows.shape[0], device=rows.device)
    inside = ((place >= begins[:, None]) & (place < ends[:, None]))[:, :, None]
    if matrices.shape[0] > FEW:
        product = torch.bmm(torch.where(inside, rows, torch.zeros_like(rows)), matrices).sum(0)
    else:
        product = torch.zeros(rows.shape[0], matrices.shape[2], dtype=rows.dtype, device=rows.device)
        for group in range(matrices.shape[0]):
            product = torch.where(inside[group], rows @ matrices[group], product)
    return product if out_dtype is None else product.to(out_dtype)
