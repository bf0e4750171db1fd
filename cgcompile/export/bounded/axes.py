"""Axes whose size depends on data: finds them in a tensor, and stores how many elements along each axis are valid.

Private interface (torch 2.11, 2.13): `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`, `SymInt.node.expr`, and
`ShapeEnv.bound_sympy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves


class Unsupported(Exception):
    """Raised for an operation that may mix padding (elements after the true size of an axis) into valid elements."""


def data_size(size: Any) -> Any:
    """Returns the expression of a size that depends on data, or None for another size."""
    return size.node.expr if isinstance(size, torch.SymInt) and free_unbacked_symbols(size) else None


def axes_of(value: Any) -> dict[int, Any]:
    """Returns the axes of a tensor whose sizes depend on data: axis -> expression."""
    if not isinstance(value, Tensor):
        return {}
    return {axis: expr for axis, size in enumerate(value.shape) if (expr := data_size(size)) is not None}


def node_axes(node: Any) -> dict[int, Any]:
    """Returns `axes_of` a node's value in the exported program; {} for anything but a node."""
    return axes_of(node.meta.get("val")) if isinstance(node, Node) else {}


def depends(node: Node) -> bool:
    """Whether a node's value, or its size, depends on data."""
    leaves = tree_leaves(node.meta.get("val"))
    return any(axes_of(leaf) or data_size(leaf) is not None for leaf in leaves)


class Counts:
    """The true sizes of axes (counts): expression in the exported program -> int64 scalar tensor."""

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}
        self._bounds: dict[Any, Any] = {}
        self._wholes: dict[Any, Any] = {}

    def define(self, expr: Any, count: Tensor, bound: Any, whole: Any = None) -> None:
        """Adds a size of at most `bound`.  `whole`: another size that it cannot exceed.  Raises Unsupported if `expr` is no symbol,
        or if another operation defined it, since the two counts may differ."""
        if expr in self._known or not expr.is_Symbol:
            raise Unsupported(f"the size {expr} is that of two selections")
        self._known[expr], self._bounds[expr] = count, bound
        if whole is not None:
            self._wholes[expr] = whole

    def same(self, expr: Any, other: Any) -> None:
        """Adds a size that equals the defined size `other`.  Raises Unsupported as `define` does."""
        self.define(expr, self.of(other), self._bounds.get(other), self._wholes.get(other))

    def lowest(self, low: Mapping[Any, int]) -> dict[Any, int]:
        """Returns the smallest value of every size.  `low`: smallest values of some sizes.  They also hold for sizes with the same
        counts."""
        pairs = [(self._known[expr], value) for expr, value in low.items() if expr in self._known]
        return {expr: max((value for other, value in pairs if other is count), default=0) for expr, count in self._known.items()}

    def part_of(self, part: Any, whole: Any) -> bool:
        """Whether `part` cannot exceed `whole`, because it counts a selection from `whole` elements."""
        if type(part).__name__ == "Min":
            return any(self.part_of(least, whole) for least in part.args)
        while part != whole:
            if part not in self._wholes:
                return False
            part = self._wholes[part]
        return True

    def holds(self, condition: Any) -> bool:
        """Whether a condition (an expression) is true for every selection: a count is at least 0, and at most its bound."""
        kind = type(condition).__name__
        if kind == "Equality":
            try:
                return self.of(condition.lhs) is self.of(condition.rhs)
            except Unsupported:
                return False
        if kind not in ("LessThan", "GreaterThan"):
            return False
        low, high = (condition.lhs, condition.rhs) if kind == "LessThan" else (condition.rhs, condition.lhs)
        if low in self._wholes and self.part_of(low, high):
            return True
        if high in self._bounds:
            return bool(low.is_Integer and low <= 0)
        return low in self._bounds and bool(high.is_Integer and _largest(self._bounds[low]) <= high)

    def knows(self, expr: Any) -> bool:
        """Whether all symbols of an expression are defined."""
        return bool(expr.free_symbols <= self._symbols())

    def is_count(self, expr: Any, count: Tensor) -> bool:
        """Whether `count` is the tensor that is stored for an expression."""
        return self._known.get(expr) is count

    def of(self, expr: Any) -> Tensor:
        """Returns the count of an expression, computed from defined sizes.  Raises Unsupported if that is not possible."""
        if expr not in self._known:
            self._known[expr] = self._computed(expr)
        return self._known[expr]

    def _computed(self, expr: Any) -> Tensor:
        kind = type(expr).__name__
        if kind == "Min":
            least = next((arg for arg in expr.args if all(self.part_of(arg, other) for other in expr.args)), None)
            if least is not None:
                return self.of(least)
        values = [int(arg) if arg.is_Integer else self.of(arg) for arg in expr.args]
        if len(values) < 2 or kind not in ("Min", "Mul", "Add") or expr.free_symbols - self._symbols():
            raise Unsupported(f"the size {expr}")
        tensors = [value for value in values if isinstance(value, Tensor)]
        total = tensors[0]
        for value in [*tensors[1:], *[value for value in values if not isinstance(value, Tensor)]]:
            if kind == "Min":
                total = torch.minimum(total, value) if isinstance(value, Tensor) else total.clamp(max=value)
            else:
                total = total * value if kind == "Mul" else total + value
        return total

    def _symbols(self) -> set[Any]:
        return {expr for expr in self._known if expr.is_Symbol}

    def valid(self, value: Tensor, axes: dict[int, Any]) -> Tensor | None:
        """Returns a mask of the valid elements that broadcasts to the padded tensor, or None if all elements are valid."""
        mask = None
        for axis, expr in axes.items():
            rows = torch.arange(value.shape[axis], device=value.device) < self.of(expr)
            rows = rows.reshape([-1 if place == axis else 1 for place in range(value.dim())])
            mask = rows if mask is None else mask & rows
        return mask

    def masked(self, value: Tensor, axes: dict[int, Any], filling: float = 0) -> Tensor:
        """Returns a padded tensor with `filling` in the padding."""
        valid = self.valid(value, axes)
        return (
            value if valid is None else torch.where(valid, value, torch.full((), filling, dtype=value.dtype, device=value.device))
        )


def _largest(size: Any) -> Any:
    """Returns the largest value of a size, by the export's ranges of its symbols."""
    return size.node.shape_env.bound_sympy(size.node.expr).upper if isinstance(size, torch.SymInt) else size


def leading(shape: Sequence[Any], axis: int) -> Any:
    """Returns the product of the sizes before an axis."""
    product: Any = 1
    for size in shape[:axis]:
        product = product * size
    return product
