"""Products of one row in a graph of Inductor, which decompositions.py turned into sums, and helpers that add calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

LONGEST = 1024
"""The most elements of a row.  They must fit the registers of one program."""

aten = torch.ops.aten

SUM = aten.sum.dim_IntList


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`total`: the sum over the axis before the last one of `row` (*lead, length, 1) times `matrix` (*lead, length, columns)."""

    total: Node
    row: Node
    matrix: Node
    lead: tuple[int, ...]
    length: int
    columns: int

    @property
    def rows(self) -> int:
        """The number of rows, each of which is multiplied with its own matrix."""
        return math.prod(self.lead)


def one_product(total: Node, longest: int = LONGEST) -> Product | None:
    """Returns the product that a sum computes, or None for any other sum."""
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


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a node, with the value that Inductor's passes read from its metadata."""
    node: Node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*_values(args), **_values(kwargs))
    return node


def _values(arguments: Any) -> Any:
    return torch.fx.node.map_aggregate(arguments, lambda argument: argument.meta["val"] if isinstance(argument, Node) else argument)


def shape_of(node: Any) -> tuple[Any, ...]:
    """Returns the shape of a tensor, or () if the value is no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
