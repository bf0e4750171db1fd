"""The memory of a value's elements, relative to the tensor that the value is a view of."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

HALF = (torch.float16, torch.bfloat16)

VIEWS = {
    aten.clone.default, aten.expand.default, aten.permute.default, aten.reshape.default, aten.select.int, aten.slice.Tensor,
    aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.dim, aten.unbind.int, aten.unsqueeze.default,
    aten.view.default,
}  # fmt: skip
"""Operations whose result consists of elements of their operand, which can be read instead of the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A view: the `offset` from the first element of `base`, and a stride for each axis of `shape`, both in elements.  `chain`: the
    operations between `base` and the value, from the value on."""

    base: Node
    chain: tuple[Node, ...]
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]


def place_of(node: Node) -> Place | None:
    """Returns the place of a value in the operand of its views and conversions to float32.  Returns None if strides cannot describe
    it.  Before its last two axes, the place may have more axes than the value: heads that share a key are expanded in a separate
    axis."""
    chain: list[Node] = []
    base = node
    while _keeps_elements(base):
        chain.append(base)
        base = base.args[0]
    value = base.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return None
    memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return viewed(Place(base=base, chain=tuple(chain), offset=0, strides=(), shape=()), memory)


def viewed(place: Place, memory: Tensor) -> Place | None:
    """Applies the chain of `place` to `memory`, a meta tensor with the layout of the base.  Returns None if the result is no
    view."""
    view: Any = memory
    for node in reversed(place.chain):
        if node.target is operator.getitem:
            view = view[node.args[1]]
        elif node.target in VIEWS and (view := _view(node, view)) is None:
            return None
    return Place(
        base=place.base, chain=place.chain, offset=view.storage_offset(), strides=tuple(view.stride()), shape=tuple(view.shape)
    )


def on(place: Place, base: Node) -> Place:
    """Returns the same place in the memory of another tensor."""
    return replace(place, base=base)


def _keeps_elements(node: Node) -> bool:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is prims.convert_element_type.default:
        return node.args[1] is torch.float32 and node.args[0].meta["val"].dtype in (*HALF, torch.float32)
    if node.target is operator.getitem:
        return node.args[0].target in VIEWS
    return node.target in VIEWS or node.target is prims.inductor_force_stride_order.default


def _view(node: Node, base: Any) -> Any:
    """Returns the node's value as a view of `base`, or None if it is not a view.  `base` may have more axes before its last two."""
    before, after = node.args[0].meta["val"], node.meta["val"]
    if node.target is aten.clone.default:
        return base
    if isinstance(after, Tensor) and after.dim() > 1 < before.dim() and after.numel() == before.numel():
        if _changes_leading_axes(node, before.shape, after.shape):
            if tuple(base.shape) != tuple(before.shape):
                return base
            view = _applied(node, base)
            return view if _same_memory(view, base) else base
        if tuple(base.shape) != tuple(before.shape):
            axes = list(node.args[1]) if node.target is aten.permute.default else []
            swapped = [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]
            return base.transpose(-1, -2) if axes and [axis % len(axes) for axis in axes] == swapped else None
    if tuple(base.shape) != tuple(before.shape):
        return None
    view = _applied(node, base)
    return view if _same_memory(view[0] if isinstance(view, list | tuple) else view, base) else None


def _applied(node: Node, tensor: Tensor) -> Any:
    # `view` raises an error for strides that need a copy; `reshape` makes the copy, which the caller detects
    target = aten.reshape.default if node.target is aten.view.default else node.target
    return target(tensor, *node.args[1:], **node.kwargs)


def _changes_leading_axes(node: Node, before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a node changes only axes before the last two, and keeps the order of all elements."""
    reshapes = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)
    return node.target in reshapes and tuple(before[-2:]) == tuple(after[-2:])


def _same_memory(view: Tensor, base: Tensor) -> bool:
    return view.untyped_storage()._cdata == base.untyped_storage()._cdata
