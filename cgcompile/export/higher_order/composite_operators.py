"""Replaces composite operators of other libraries, grouped matrix products, and resized tensors by other PyTorch operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

aten = torch.ops.aten

PYTORCH = frozenset({"aten", "prim", "prims", "cgcompile"})
"""Namespaces of operators that compilers know."""

GROUPED = "transformers::grouped_mm_fallback"
"""Operator of transformers (5.17, 5.23) for devices without a grouped product.  It reads the groups' ends on the host."""


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
