"""Results of several paths whose sizes depend on data.  Each path pads them to one size and returns how many elements are valid.
So all branches return tensors of one shape.  After the last branch the program selects the valid elements."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Node

from .lines import Line, Slot

aten = torch.ops.aten

Axis = tuple[int, int]
"""(number of a result, axis)."""


class Body(Protocol):
    """The part of `merge._Body`, a graph under construction, that is used here."""

    root: Line

    def value(self, line: Line, node: Node) -> Node:
        """Returns the node of this graph for a line's node."""
        raise NotImplementedError

    def add(self, target: Any, args: tuple[Any, ...], like: Node, **more: Any) -> Node:
        """Adds an operation with the source line of `like`."""
        raise NotImplementedError


class CountedResults:
    """The axes of results whose sizes depend on data on some of these lines."""

    def __init__(self, lines: Sequence[Line]) -> None:
        axes: list[Axis] = sorted({slot[1] for line in lines for slot in line.outputs if slot[0] == "count"})
        self._targets = {axis: _largest([_size(line, axis) for line in lines]) for axis in axes}
        first_axes: dict[tuple[Any, ...], Axis] = {}
        self._counts = {axis: first_axes.setdefault(tuple([_counted(line, axis) for line in lines]), axis) for axis in axes}

    @property
    def slots(self) -> list[Slot]:
        """The branch outputs with counts of valid elements.  Axes that always have the same count share one output."""
        return [("count", axis) for axis in dict.fromkeys(self._counts.values())]

    def count(self, body: Body, line: Line, axis: Axis) -> Node:
        """Returns the number of valid elements along an axis of a result on one line."""
        if ("count", axis) in line.outputs:
            return body.value(line, line.outputs["count", axis])
        result = body.value(line, line.outputs["result", axis[0]])
        device = result.meta["val"].device
        return body.add(aten.full.default, ([], _sized(body, result, axis[1])), result, dtype=torch.int64, device=device)

    def filled(self, body: Body, line: Line, number: int) -> Any:
        """Returns result `number` of one line, padded with zeros to the common size of all lines."""
        value = line.outputs["result", number]
        if not isinstance(value, Node):
            return value
        value = body.value(line, value)
        for axis, target in self._of(number).items():
            size = value.meta["val"].shape[axis]
            missing = None if target is None else _number(body, target - _expression(size), value)
            if missing is not None and missing != 0:
                padding = [*[0, 0] * (value.meta["val"].dim() - 1 - axis), 0, missing]  # from the last axis to the first
                value = body.add(aten.constant_pad_nd.default, (value, padding), value)
        return value

    def selected(self, body: Body, number: int, value: Any, counts: Mapping[Axis, Node]) -> Any:
        """Returns result `number` of the program: the valid elements of the padded `value`."""
        for axis in self._of(number):
            size = _sized(body, value, axis)
            order = body.add(aten.arange.default, (size,), value, dtype=torch.int64, device=value.meta["val"].device)
            valid = body.add(aten.lt.Tensor, (order, counts[self._counts[number, axis]]), value)
            value = body.add(aten.index.Tensor, (value, [*[None] * axis, valid]), value)
        return value

    def _of(self, number: int) -> dict[int, Any]:
        """Returns {axis: padded size} of a result; a size is None if it is unknown."""
        return {axis: target for (result, axis), target in self._targets.items() if result == number}


def _size(line: Line, axis: Axis) -> Any:
    value = line.outputs["result", axis[0]]
    return _expression(value.meta["val"].shape[axis[1]]) if isinstance(value, Node) else None


def _counted(line: Line, axis: Axis) -> Any:
    """Returns a value that is equal for two axes of one line if they have the same number of valid elements."""
    return line.outputs.get(("count", axis), str(_size(line, axis)))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _largest(sizes: Sequence[Any]) -> Any:
    """Returns a size that is certainly at least as large as all other sizes, or None."""
    for size in sizes:
        if size is not None and all(other is not None and (size - other).is_nonnegative for other in sizes):
            return size
    return None


def _sized(body: Body, value: Node, axis: int) -> Any:
    """Returns the size of a tensor's axis as an operator argument."""
    size = value.meta["val"].shape[axis]
    return body.add(aten.sym_size.int, (value, axis), value) if isinstance(size, torch.SymInt) else size


def _number(body: Body, expression: Any, like: Node) -> Any:
    """Returns an expression of input sizes as an operator argument, or None for other expressions."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        for node in body.root.program.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return body.add(aten.sym_size.int, (body.value(body.root, node), axis), like)
        return None
    compute = {"Add": operator.add, "Mul": operator.mul}.get(type(expression).__name__)
    parts = [_number(body, part, like) for part in expression.args]
    if compute is None or any(part is None for part in parts):
        return None
    total, *others = parts
    for part in others:
        total = body.add(compute, (total, part), like)
    return total
