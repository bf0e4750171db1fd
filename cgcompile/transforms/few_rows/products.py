"""Products of one row in a graph of Inductor's, which decompositions.py made sums of, and calls that are put into it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

LONGEST = 1024
"""Elements of a row, at most: so many are in the registers of one program."""

aten = torch.ops.aten

SUM = aten.sum.dim_IntList


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`total`, over the axis before the last one, of `row` (*lead, length, 1) times `matrix` (*lead, length, columns)."""

    total: Node
    row: Node
    matrix: Node
    lead: tuple[int, ...]
    length: int
    columns: int

    @property
    def rows(self) -> int:
        """How many rows are multiplied, each with a matrix of its own."""
        return math.prod(self.lead)


def one_product(total: Node, longest: int = LONGEST) -> Product | None:
    """None for another sum."""
    product, axes = total.args[:2]
    if list(axes or ()) != [-2] or len(total.args) > 2 or product.target is not aten.mul.Tensor or len(product.users) > 1:
        return None
    row, matrix = product.args
    if not isinstance(row, Node) or not isinstance(matrix, Node):
        return None
    *lead, length, columns = shape_of(product)
    if not all(isinstance(size, int) for size in shape_of(product)) or not 1 < length <= longest:
        return None
    if shape_of(row) != (*lead, length, 1) or shape_of(matrix) != (*lead, length, columns):
        return None
    return Product(total=total, row=row, matrix=matrix, lead=tuple(lead), length=length, columns=columns)


def call(graph: Graph, target: Any, *args: Any, **named: Any) -> Node:
    """A new node, with the value that passes of Inductor's read from it."""
    node: Node = graph.call_function(target, args, named)
    node.meta["val"] = target(*_values(args), **_values(named))
    return node


def _values(arguments: Any) -> Any:
    return torch.fx.node.map_aggregate(arguments, lambda argument: argument.meta["val"] if isinstance(argument, Node) else argument)


def shape_of(node: Any) -> tuple[Any, ...]:
    """() also of what is no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
