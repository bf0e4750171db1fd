"""Axes of a bounded size: which of a tensor's axes have one, and how many of their elements count.

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
    """An operation that is not known to keep the elements behind the true sizes apart from the others."""


def data_size(size: Any) -> Any:
    """The expression of a size that depends on data, None for another."""
    return size.node.expr if isinstance(size, torch.SymInt) and free_unbacked_symbols(size) else None


def axes_of(value: Any) -> dict[int, Any]:
    """The axes of a tensor whose size depends on data: axis -> expression."""
    if not isinstance(value, Tensor):
        return {}
    return {axis: expr for axis, size in enumerate(value.shape) if (expr := data_size(size)) is not None}


def node_axes(node: Any) -> dict[int, Any]:
    """`axes_of` the value that a node has in the exported program; of what is no node none."""
    return axes_of(node.meta.get("val")) if isinstance(node, Node) else {}


def depends(node: Node) -> bool:
    """Whether a node's value, or its size, depends on data."""
    leaves = tree_leaves(node.meta.get("val"))
    return any(axes_of(leaf) or data_size(leaf) is not None for leaf in leaves)


class Counts:
    """The true sizes of axes, as tensors: int64 of no axes, by the expressions that the exported program has for them."""

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}
        self._bounds: dict[Any, Any] = {}
        self._wholes: dict[Any, Any] = {}

    def define(self, expr: Any, count: Tensor, bound: Any, whole: Any = None) -> None:
        """A new size, `bound` at the most; `whole`: the size that it is a part of.  Raises Unsupported where another operation has
        it already: that they agree is a promise of the data."""
        if expr in self._known or not expr.is_Symbol:
            raise Unsupported(f"the size {expr} is that of two selections")
        self._known[expr], self._bounds[expr] = count, bound
        if whole is not None:
            self._wholes[expr] = whole

    def same(self, expr: Any, other: Any) -> None:
        """A new size that is another one, which is known.  Raises Unsupported as `define` does."""
        self.define(expr, self.of(other), self._bounds.get(other), self._wholes.get(other))

    def lowest(self, low: Mapping[Any, int]) -> dict[Any, int]:
        """The smallest values of sizes, where those of some are known: of all that have the same count."""
        known = [(self._known[expr], value) for expr, value in low.items() if expr in self._known]
        return {expr: max((value for other, value in known if other is count), default=0) for expr, count in self._known.items()}

    def part_of(self, part: Any, whole: Any) -> bool:
        """Whether a size is surely no larger than another one: so many of these elements are selected."""
        if type(part).__name__ == "Min":
            return any(self.part_of(least, whole) for least in part.args)
        while part != whole:
            if part not in self._wholes:
                return False
            part = self._wholes[part]
        return True

    def holds(self, condition: Any) -> bool:
        """Whether a condition, an expression, is so of a size whatever is selected: it is no less than 0, and no more than fits."""
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
        """Whether all that an expression is made of is known."""
        return bool(expr.free_symbols <= self._symbols())

    def is_count(self, expr: Any, count: Tensor) -> bool:
        """Whether this is the count that an expression stands for."""
        return self._known.get(expr) is count

    def of(self, expr: Any) -> Tensor:
        """The count that an expression stands for.  Raises Unsupported for what is not made of known ones."""
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
        """Which elements of a padded tensor count: a mask of as many axes, to be broadcast; None where all do."""
        mask = None
        for axis, expr in axes.items():
            rows = torch.arange(value.shape[axis], device=value.device) < self.of(expr)
            rows = rows.reshape([-1 if place == axis else 1 for place in range(value.dim())])
            mask = rows if mask is None else mask & rows
        return mask

    def masked(self, value: Tensor, axes: dict[int, Any], filling: float = 0) -> Tensor:
        """A padded tensor with `filling` where no element counts."""
        valid = self.valid(value, axes)
        return (
            value if valid is None else torch.where(valid, value, torch.full((), filling, dtype=value.dtype, device=value.device))
        )


def _largest(size: Any) -> Any:
    """The largest value of a size in the range that the export has for its dimensions."""
    return size.node.shape_env.bound_sympy(size.node.expr).upper if isinstance(size, torch.SymInt) else size


def leading(shape: Sequence[Any], axis: int) -> Any:
    """The product of the sizes before an axis."""
    product: Any = 1
    for size in shape[:axis]:
        product = product * size
    return product
