"""The values of export's symbols for the tensors of a call, and the weight of an operation, by which `cut` moves small graphs.

Private interfaces (torch 2.11, 2.13): the sympy expression of a SymInt (`size.node.expr`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ..errors import BuildError
from .node_kinds import is_free

LIGHT = 16384
"""Up to this many elements, an operation on the host is as fast as a small kernel: about 7 us at 4 bytes each and 10 GB/s."""

Bindings = Mapping[Any, int]
"""The value of each of export's symbols."""


def bindings(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
    """Returns the values of the symbols of the program's inputs at the sizes of `tensors`.  Raises inputs-unlike."""
    names = program.graph_signature.user_inputs
    inputs = [
        node
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    if len(inputs) != len(tensors):
        raise BuildError("inputs-unlike", f"the program takes {len(inputs)} tensors, the call has {len(tensors)}")
    symbol_values: dict[Any, int] = {}
    for node, tensor in zip(inputs, tensors, strict=True):
        fake = node.meta["val"]
        if (fake.dtype, fake.dim()) != (tensor.dtype, tensor.dim()):
            raise BuildError(
                "inputs-unlike",
                f"input {node.name!r} is {tensor.dtype} with {tensor.dim()} axes, expected {fake.dtype} with {fake.dim()}",
            )
        for axis, (size, actual) in enumerate(zip(fake.shape, tensor.shape, strict=True)):
            if isinstance(size, torch.SymInt):
                _bind(f"input {node.name!r}, axis {axis}", size.node.expr, actual, symbol_values)
            elif size != actual:
                raise BuildError("inputs-unlike", f"input {node.name!r}, axis {axis}: {actual}, expected {size}")
    return symbol_values


def _bind(where: str, expr: Any, actual: int, symbol_values: dict[Any, int]) -> None:
    """Solves `expr` = `actual` for the symbol.  `expr` is a multiple of one symbol plus a constant, as the axes of inputs are."""
    (symbol,) = expr.free_symbols
    shift = int(expr.subs(symbol, 0))
    step = int(expr.subs(symbol, 1)) - shift
    value, remainder = divmod(actual - shift, step)
    if remainder or symbol_values.setdefault(symbol, value) != value:
        raise BuildError(
            "inputs-unlike", f"{where}: {actual} is not {expr}" + ("" if remainder else f" with {symbol} = {symbol_values[symbol]}")
        )


def number(value: Any, known: Bindings) -> Any:
    """Returns a size, or a number computed from sizes, as a Python number.  Raises inputs-unlike if inputs do not determine it."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    expression = value.node.expr.subs(known) if hasattr(value.node.expr, "subs") else value.node.expr
    if getattr(expression, "free_symbols", None):
        raise BuildError("inputs-unlike", f"the size {value} does not follow from the sizes of the inputs")
    if isinstance(value, torch.SymBool):
        return bool(expression)
    return int(expression) if isinstance(value, torch.SymInt) else float(expression)


def weigh(program: ExportedProgram, node: Node, heavy: int) -> int:
    """Returns 0 for a free operation, 1 for a light one, and at least `heavy` for an operation that is much slower on the host than
    on a GPU."""
    if is_free(node):
        return 0
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise not in tags and torch.Tag.reduction not in tags and str(node.target) not in ONE_PASS:
        return max(heavy, 1)
    values = [node.meta.get("val"), *[source.meta.get("val") for source in node.all_input_nodes]]
    tensors = [leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return 1 if sum(_largest(program, tensor) for tensor in tensors) <= LIGHT else max(heavy, 1)


ONE_PASS = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "add_.Tensor", "sub.Tensor", "mul.Tensor", "mul_.Tensor", "div.Tensor", "sum.default", "sum.dim_IntList",
        "mean.default", "mean.dim", "amax.default", "amin.default", "max.default", "min.default", "max.dim", "min.dim",
        "argmax.default", "argmin.default", "any.default", "all.default", "any.dim", "all.dim", "cumsum.default", "clone.default",
        "softmax.int", "log_softmax.int", "cat.default", "stack.default", "copy_.default", "fill_.Scalar", "fill_.Tensor",
        "zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default", "index.Tensor", "gather.default",
        "index_select.default", "embedding.default", "where.self", "masked_fill.Scalar", "one_hot.default",
    )
)  # fmt: skip
"""Operations that read each element once or a few times, and that torch does not tag as pointwise or as reductions."""


def _largest(program: ExportedProgram, tensor: torch.Tensor) -> float:
    """Returns the number of elements of a tensor at the largest declared sizes; infinite if data determines a size."""
    highest = {symbol: bounds.upper for symbol, bounds in program.range_constraints.items()}
    count = 1.0
    for size in tensor.shape:
        if isinstance(size, torch.SymInt):
            extent = size.node.expr.subs(highest)
            if extent.free_symbols or not extent.is_finite:
                return float("inf")
            count *= float(extent)
        else:
            count *= size
    return count
