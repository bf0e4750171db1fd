"""Checks that an operator does not mix padding into valid elements.

Padding is the elements after the true size of an axis whose size depends on data.  An operator is safe if it does not combine
elements along such an axis.  The tables below list the axes along which operators combine elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from ..torch_program import arguments
from .axes import Unsupported, leading, node_axes

NOT_COMBINING = frozenset({
    "__and__.Scalar", "__and__.Tensor", "__or__.Scalar", "__or__.Tensor", "__xor__.Tensor", "_to_copy", "alias", "clone",
    "contiguous", "copy", "detach", "dropout", "expand", "expand_as", "feature_dropout",
    "fill.Scalar", "fill.Tensor", "floor_divide", "floor_divide.Scalar", "full",
    "full_like", "lift_fresh_copy", "mT", "masked_fill.Tensor", "movedim.int", "new_full", "new_ones", "new_zeros", "numpy_T",
    "ones", "ones_like", "permute", "stack", "swapaxes", "t", "to.device", "to.dtype",
    "to.dtype_layout", "to.other", "transpose.int", "type_as", "unsqueeze", "where.Scalar", "where.ScalarOther",
    "where.ScalarSelf", "zeros", "zeros_like",
})  # fmt: skip
"""Operators that combine no elements along any axis, although they lack PyTorch's tag `pointwise`."""

COMBINING_DIM = frozenset({
    "all.dim", "all.dims", "amax", "amin", "any.dim", "any.dims", "argmax", "argmin", "argsort", "argsort.stable", "cat",
    "chunk", "cumprod", "cumsum", "flip", "gather", "glu", "index_select", "linalg_vector_norm", "log_softmax.int",
    "logcumsumexp", "logsumexp", "max.dim", "mean.dim", "min.dim", "narrow", "norm.ScalarOpt_dim", "prod.dim_int", "roll",
    "select.int", "slice.Tensor", "softmax.int", "sort", "sort.stable", "split.Tensor", "split_with_sizes", "squeeze.dim",
    "squeeze.dims", "std.correction",
    "sum.dim_IntList", "topk", "unbind.int", "var.correction",
})  # fmt: skip
"""Operators that combine or move elements along the axes in their argument `dim` or `dims`, and along no other axis."""

CUMULATIVE = frozenset(["cumsum", "cumprod", "logcumsumexp"])
"""Operators whose result at a position depends only on elements up to it.  Padding comes after valid elements."""

MATRIX_PRODUCTS = ("linear", "addmm")
"""Operators that sum along the last axis of their left matrix."""

BATCHED = frozenset({
    "adaptive_avg_pool2d", "avg_pool2d", "batch_norm", "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d",
    "group_norm", "max_pool2d", "pixel_shuffle", "upsample_bilinear2d.vec", "upsample_nearest2d.vec",
})  # fmt: skip
"""Operators that compute the rows along axis 0 of their first argument independently."""


def name_of(node: Node) -> str:
    """Returns an aten operator's name with its overload, such as `sum.dim_IntList`, but without ".default".  Returns "" for other
    operators."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    name = str(target).removeprefix("aten.")
    return name.removesuffix(".default")


def is_pointwise(node: Node) -> bool:
    """Whether an operator combines no elements along any axis."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in NOT_COMBINING


def check_rows(node: Node) -> None:
    """Raises Unsupported if valid elements of the result may depend on padding.  Does not check indices: the caller sets
    indices in the padding to 0."""
    name = name_of(node)
    inputs = arguments(node)
    if is_pointwise(node):
        return
    if name in COMBINING_DIM:
        _check_dim(node, name, inputs)
    elif name in MATRIX_PRODUCTS:
        _check_matrix_product(node, name, inputs)
    elif name in ("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "view_as", "reshape_as"):
        _check_view(node, inputs)
    elif name in ("layer_norm", "rms_norm", "native_layer_norm"):
        inner = inputs["input"].meta["val"].dim() - len(inputs["normalized_shape"])
        _require(all(axis < inner for axis in node_axes(inputs["input"])), node)
    elif name == "embedding":
        _require(not node_axes(inputs["weight"]), node)
    elif name in BATCHED:
        first, *others = node.all_input_nodes
        _require(set(node_axes(first)) <= {0} and not any(map(node_axes, others)) and not inputs.get("training"), node)
    elif name in ("select_scatter", "slice_scatter"):
        axes = node_axes(inputs["self"])
        _require(inputs["dim"] % inputs["self"].meta["val"].dim() not in axes and len(axes) == len(node_axes(node)), node)
    elif name in ("constant_pad_nd", "pad"):
        rank = node.meta["val"].dim()
        padded = {rank - 1 - at // 2 for at, size in enumerate(inputs["pad"]) if size != 0}
        _require(not padded & set(node_axes(node)) and inputs.get("mode", "constant") == "constant", node)
    elif name == "searchsorted.Tensor":
        rows = inputs["sorted_sequence"], inputs["self"]
        _require(all(row.meta["val"].dim() - 1 not in node_axes(row) for row in rows) and inputs["sorter"] is None, node)
        _require(inputs["sorted_sequence"].meta["val"].dim() == 1 or node_axes(rows[0]) == node_axes(rows[1]), node)
    elif name == "repeat":
        source, repeats = inputs["self"], inputs["repeats"]
        more = len(repeats) - source.meta["val"].dim()
        _require(all(repeats[more + axis] == 1 for axis in node_axes(source)), node)
        _require(len(node_axes(source)) == len(node_axes(node)), node)
    elif name == "arange":
        pass
    else:
        raise Unsupported(str(node.target))


def _check_dim(node: Node, name: str, inputs: Mapping[str, Any]) -> None:
    for source in [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)]:
        axes, rank = node_axes(source), source.meta["val"].dim()
        if not axes:
            continue
        named = inputs.get("dim", inputs.get("dims"))
        if named is None or named == []:
            raise Unsupported(str(node.target))
        mixed = {axis % max(1, rank) for axis in (named if isinstance(named, list | tuple) else [named])}
        _require(not mixed & set(axes) or name in CUMULATIVE or (name in ("gather", "index_select")), node)


def _check_matrix_product(node: Node, name: str, inputs: Mapping[str, Any]) -> None:
    left, *others = [inputs["mat1"], inputs["mat2"], inputs["self"]] if name == "addmm" else node.all_input_nodes
    _require(left.meta["val"].dim() - 1 not in node_axes(left) and not any(map(node_axes, others)), node)


def _check_view(node: Node, inputs: Mapping[str, Any]) -> None:
    """Raises Unsupported if the view could move padding before valid elements.  It cannot if the product of the sizes before
    the axis with padding stays the same."""
    source = next(operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor))
    before, after = node_axes(source), node_axes(node)
    _require(len(before) == len(after), node)
    for (axis, expr), (place, other) in zip(before.items(), after.items(), strict=True):
        outer, new_outer = leading(source.meta["val"].shape, axis), leading(node.meta["val"].shape, place)
        _require(_same(outer, new_outer) and (expr == other or len(before) == 1), node)


def _same(one: Any, other: Any) -> bool:
    return _expr(one) == _expr(other)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _require(holds: bool, node: Node) -> None:
    if not holds:
        raise Unsupported(str(node.target))
