"""Finds the valid range of integer inputs that are used as indices, from the sizes of the indexed tensors.

It follows operations that keep all elements, unchanged or plus a constant.  Other operations give no information: a slice, for
example, may drop elements that are out of range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..weights import weight_placeholders

aten = torch.ops.aten

KEEPING = frozenset({
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.expand.default,
    aten.flatten.using_ints, aten.lift_fresh_copy.default, aten.movedim.int, aten.permute.default,
    aten.reshape.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default,
    aten.transpose.int, aten.unflatten.int, aten.unsqueeze.default, aten.view.default,
    aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default,
})  # fmt: skip
"""Operators whose result has all elements of their first argument.  Casts count if the new dtype can represent the old one."""

SHIFTING = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
"""Operator that adds or subtracts a constant second argument -> sign."""

WIDTH = {torch.uint8: 1, torch.int8: 1, torch.int16: 2, torch.int32: 4, torch.int64: 8}

Range = tuple[int, int]


def index_ranges(program: ExportedProgram, varying: Collection[str] = ()) -> list[tuple[int, int] | None]:
    """Returns (low, high) with low <= element < high for each user input, in order, or None if unknown.  Eager PyTorch raises for
    other values.  `varying`: names of state whose number of rows is chosen when the bundle is loaded."""
    names = weight_placeholders(program)
    unknown = set[Node]()
    for node in program.graph.nodes if varying else ():
        if names.get(node.name) in varying or (node.op == "call_function" and node.args and node.args[0] in unknown):
            unknown.add(node)  # also views of these tensors
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    bounds: list[tuple[int, int] | None] = []
    for name in program.graph_signature.user_inputs:
        node = placeholders.get(name) if isinstance(name, str) else None
        dtype = _dtype(node)
        ranges = list(_uses(node, 0, unknown)) if node is not None and dtype in WIDTH else []
        low = max((low for low, _ in ranges), default=0)
        high = min((high for _, high in ranges), default=0)
        bounds.append((low, high) if low < high else None)
    return bounds


def _uses(node: Node, added: int, unknown: Set[Node]) -> Iterator[Range]:
    """Yields the ranges that the users of `node` require of an input; `node` has the input's elements plus `added`."""
    for user in node.users:
        if user.op != "call_function":
            continue
        first = user.args[0] if user.args else None
        if user.target in KEEPING and first is node and _holds(_dtype(user), _dtype(node)):
            yield from _uses(user, added, unknown)
        elif user.target in SHIFTING and first is node and _is_constant(user):
            yield from _uses(user, added + SHIFTING[user.target] * user.args[1], unknown)
        else:
            for low, high in _indexed(user, node) if unknown.isdisjoint(user.all_input_nodes) else ():
                yield low - added, high - added


def _indexed(user: Node, node: Node) -> Iterator[Range]:
    """Yields the ranges that `user` requires of `node` as an index."""
    args = user.args
    if user.target in (aten.embedding.default, aten.embedding_bag.padding_idx, aten.embedding_bag.default):
        if args[1] is node:
            yield from _axis(args[0], 0, negative=False)
    elif user.target is aten.one_hot.default:
        if isinstance(args[1], int) and args[1] > 0:  # -1: the number of classes follows from the largest value
            yield 0, args[1]
    elif user.target in (aten.index_select.default, aten.gather.default):
        if args[2] is node:
            yield from _axis(args[0], args[1], negative=False)
    elif user.target in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        axis = 0
        for index in args[1]:
            mask = _dtype(index) in (torch.bool, torch.uint8)
            if index is node and not mask:
                yield from _axis(args[0], axis, negative=True)
            axis += index.meta["val"].dim() if mask else 1  # a mask selects along all its dimensions


def _axis(table: Any, axis: Any, *, negative: bool) -> Iterator[Range]:
    """Yields the range of indices of an axis, if its size is a constant."""
    value = table.meta.get("val") if isinstance(table, Node) else None
    if isinstance(value, torch.Tensor) and isinstance(axis, int) and value.dim():
        size = value.shape[axis]
        if isinstance(size, int):
            yield (-size if negative else 0), size


def _is_constant(user: Node) -> bool:
    """Whether an addition's second argument is an integer constant without `alpha`, and the int64 sum cannot overflow."""
    number = user.args[1]
    return type(number) is int and abs(number) < 1 << 31 and not user.kwargs.get("alpha") and _dtype(user) is torch.int64


def _holds(new: torch.dtype | None, old: torch.dtype | None) -> bool:
    return new in WIDTH and old in WIDTH and (new is old or (WIDTH[new] > WIDTH[old]))


def _dtype(node: Node | None) -> torch.dtype | None:
    value = node.meta.get("val") if node is not None else None
    return value.dtype if isinstance(value, torch.Tensor) else None
