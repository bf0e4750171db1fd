"""Operators that keep the elements in front of a bounded axis apart from those behind: which axes they mix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from ..torch_program import arguments
from .axes import Unsupported, leading, node_axes

SAME = frozenset(
    """unsqueeze squeeze.dim squeeze.dims transpose.int swapaxes permute t numpy_T mT clone contiguous to.dtype to.device to.other
    to.dtype_layout _to_copy detach alias lift_fresh_copy expand expand_as dropout feature_dropout type_as zeros_like ones_like
    full_like new_zeros new_ones new_full zeros ones full movedim.int stack masked_fill.Tensor where.ScalarOther where.ScalarSelf
    where.Scalar __and__.Tensor __or__.Tensor __xor__.Tensor __and__.Scalar __or__.Scalar floor_divide floor_divide.Scalar
    square float_power.Tensor_Scalar reciprocal clip pad.no to relu sym_size.int""".split()
)
"""Every element of the result follows from the elements at its own place."""

ALONG = frozenset(
    """softmax.int log_softmax.int _softmax _log_softmax sum.dim_IntList mean.dim amax amin max.dim min.dim argmax argmin prod.dim_int
    any.dim all.dim any.dims all.dims std.correction var.correction logsumexp linalg_vector_norm norm.ScalarOpt_dim
    sort sort.stable argsort argsort.stable topk cumsum cumprod logcumsumexp flip roll unbind.int split.Tensor split_with_sizes
    chunk cat select.int slice.Tensor narrow index_select gather glu unflatten.int""".split()
)
"""They mix elements along the axes that `dim` or `dims` name."""

RUNNING = frozenset("cumsum cumprod logcumsumexp".split())
"""An element follows from those before it."""

CONTRACTED = ("linear", "addmm")
"""They sum along the last axis of a matrix."""

BATCHED = frozenset(
    """conv1d conv2d conv3d conv2d.padding conv1d.padding max_pool2d avg_pool2d adaptive_avg_pool2d batch_norm group_norm
    instance_norm upsample_nearest2d.vec upsample_bilinear2d.vec pixel_shuffle""".split()
)
"""Their first argument has rows along axis 0 that do not depend on each other."""


def name_of(node: Node) -> str:
    """`sum.dim_IntList`, without the overload where it is the default one; "" for what is no operator of aten."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    name = str(target).removeprefix("aten.")
    return name.removesuffix(".default")


def is_pointwise(node: Node) -> bool:
    """Whether every element of the result follows from the elements at its own place."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in SAME


def check_rows(node: Node) -> None:
    """Raises Unsupported unless no element that counts follows from one that does not, for a node whose indices are masked."""
    name = name_of(node)
    given = arguments(node)
    if is_pointwise(node):
        return
    if name in ALONG:
        _check_along(node, name, given)
    elif name in CONTRACTED:
        _check_contracted(node, name, given)
    elif name in ("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "view_as", "reshape_as"):
        _check_view(node, given)
    elif name in ("layer_norm", "rms_norm", "native_layer_norm"):
        inner = given["input"].meta["val"].dim() - len(given["normalized_shape"])
        _require(all(axis < inner for axis in node_axes(given["input"])), node)
    elif name == "embedding":
        _require(not node_axes(given["weight"]), node)
    elif name in BATCHED:
        first, *others = node.all_input_nodes
        _require(set(node_axes(first)) <= {0} and not any(map(node_axes, others)), node)
    elif name == "arange":
        pass
    else:
        raise Unsupported(str(node.target))


def _check_along(node: Node, name: str, given: Mapping[str, Any]) -> None:
    for source in [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]:
        axes, rank = node_axes(source), source.meta["val"].dim()
        if not axes:
            continue
        named = given.get("dim", given.get("dims"))
        if named is None or named == []:
            raise Unsupported(str(node.target))
        mixed = {axis % max(1, rank) for axis in (named if isinstance(named, list | tuple) else [named])}
        _require(not mixed & set(axes) or name in RUNNING or (name in ("gather", "index_select")), node)


def _check_contracted(node: Node, name: str, given: Mapping[str, Any]) -> None:
    left, *others = [given["mat1"], given["mat2"], given["self"]] if name == "addmm" else node.all_input_nodes
    _require(left.meta["val"].dim() - 1 not in node_axes(left) and not any(map(node_axes, others)), node)


def _check_view(node: Node, given: Mapping[str, Any]) -> None:
    """Elements that count stay in front: what comes before a bounded axis is as it was."""
    source = next(each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor))
    before, after = node_axes(source), node_axes(node)
    _require(len(before) == len(after), node)
    for (axis, expr), (place, other) in zip(before.items(), after.items(), strict=True):
        outer, now = leading(source.meta["val"].shape, axis), leading(node.meta["val"].shape, place)
        _require(_same(outer, now) and (expr == other or len(before) == 1), node)


def _same(one: Any, other: Any) -> bool:
    return _expr(one) == _expr(other)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _require(holds: bool, node: Node) -> None:
    if not holds:
        raise Unsupported(str(node.target))
