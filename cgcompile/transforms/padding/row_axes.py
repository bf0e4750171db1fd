"""Facts about operators that need no trials: the axes along which they combine elements, and which operators only move elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from .padded_values import PaddedValue

Arguments = Mapping[str, Any]
"""Arguments by the names of the operator's schema.  Tensors are padded values."""

Rows = tuple[tuple[str, ...], Sequence[int]]
"""The arguments whose rows an operator keeps separate, all of the rank of the result; and the axes along which it combines
elements (negative ones count from the last).  This holds if all other arguments are the same at both sizes."""

MOVES = frozenset({
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "t", "numpy_T", "squeeze",
    "unsqueeze", "expand", "expand_as", "repeat", "select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind",
    "clone", "contiguous", "alias", "detach", "cat", "stack", "roll", "flip", "constant_pad_nd",
})  # fmt: skip
"""Operators that only move elements of their inputs, whatever the values are, or add constants."""


def _last(arguments: Arguments) -> Rows:
    return ("input",), (-1,)


def _product(arguments: Arguments) -> Rows:
    one, other = [name for name in arguments if name in ("self", "other", "mat2")]
    if arguments[other].spot:
        return (one, other), (-1, -2)
    return ((one,), (-1,)) if arguments[other].short.dim() <= 2 else ((), ())


def _biased_product(arguments: Arguments) -> Rows:
    return ("mat1",), (-1,)


def _convolution(arguments: Arguments) -> Rows:
    rank = arguments["input"].short.dim()
    return (("input",), range(1, rank)) if arguments["weight"].short.dim() == rank else ((), ())


def _along(arguments: Arguments) -> Rows:
    return ("self",), (arguments["dim"],)


def _layer_norm(arguments: Arguments) -> Rows:
    return ("input",), range(-len(arguments["normalized_shape"]), 0)


def _batch_norm(arguments: Arguments) -> Rows:
    return (("input",), (1,)) if arguments.get("training", False) is False else ((), ())


def _pool(axes: int) -> Callable[[Arguments], Rows]:
    return lambda arguments: (("self",), range(-axes, 0))


def _attention(arguments: Arguments) -> Rows:
    return (("query", "key", "value"), (-1, -2)) if arguments.get("attn_mask") is None else ((), ())


ROWS: Mapping[str, Callable[[Arguments], Rows]] = {
    "linear": _last, "matmul": _product, "mm": _product, "bmm": _product, "addmm": _biased_product,
    "conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution, "convolution": _convolution,
    "softmax": _along, "_softmax": _along, "log_softmax": _along, "layer_norm": _layer_norm, "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm, "scaled_dot_product_attention": _attention,
    "max_pool1d": _pool(1), "max_pool2d": _pool(2), "max_pool3d": _pool(3), "max_pool2d_with_indices": _pool(2),
    "max_pool3d_with_indices": _pool(3), "avg_pool1d": _pool(1), "avg_pool2d": _pool(2), "avg_pool3d": _pool(3),
    "adaptive_avg_pool1d": _pool(1), "adaptive_avg_pool2d": _pool(2), "adaptive_avg_pool3d": _pool(3),
}  # fmt: skip


def kept_rows(node: Node, inputs: tuple[Sequence[Any], Mapping[str, Any]]) -> tuple[list[PaddedValue], list[int]]:
    """Returns the values whose rows an aten operator keeps separate, and the axes along which it combines elements.  Returns no
    values for an unknown operator.  `inputs`: its arguments, tensors as padded values."""
    rule = ROWS.get(_name(node))
    by_name = (
        {**dict(zip([argument.name for argument in node.target._schema.arguments], inputs[0], strict=False)), **inputs[1]}
        if rule
        else {}
    )
    names, axes = rule(by_name) if rule else ((), ())
    values = [by_name[name] for name in names]
    if not all(isinstance(value, PaddedValue) and isinstance(value.short, torch.Tensor) for value in values):
        return [], []
    return values, [axis % value.short.dim() for value in values[:1] for axis in axes]


def moves(node: Node) -> bool:
    """Whether an operator only moves elements (MOVES)."""
    return _name(node) in MOVES


def _name(node: Node) -> str:
    """Returns the name of an aten operator without its overload, or "" for any other."""
    target = node.target
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if is_aten else ""
