"""A product of one row whose columns are parts of equal size, queries, keys and values for example, as a product for every part.

Inductor makes one kernel of them again, since they read one row, and of what becomes of every part, too: the writes to a cache of
keys and one of values are in it then.  As one product, they are a kernel behind it, because they have another shape.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .products import SUM, Product, call, one_product, shape_of

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """`product`, then operations by element and at last what cuts (`chain`): `parts` with their numbers, of `columns` each."""

    product: Product
    chain: tuple[Node, ...]
    parts: dict[Node, int]
    columns: int


def split_products(graph: Graph) -> None:
    """Changes the graph in place."""
    for node in graph.find_nodes(op="call_function", target=SUM):
        product = one_product(node)
        split = _split(product) if product is not None and product.rows == 1 else None
        if split is not None:
            with graph.inserting_before(split.chain[-1]):
                for part, number in split.parts.items():
                    made = call(graph, aten.reshape.default, _part(graph, split, number), list(shape_of(part)))
                    part.replace_all_uses_with(made)
            for each in [*split.parts, *reversed(split.chain), node, node.args[0]]:
                graph.erase_node(each)


def _split(product: Product) -> _Split | None:
    chain, node = list[Node](), product.total
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.unbind.int or user.target in (aten.split.Tensor, aten.split_with_sizes.default):
            parts = _parts(user)
            size = math.prod(user.meta["val"][0].shape)
            return None if parts is None else _Split(product=product, chain=(*chain, user), parts=parts, columns=size)
        if not _allowed(user, product.columns):
            return None
        chain.append(user)
        node = user
    return None


def _parts(cut: Node) -> dict[Node, int] | None:
    """The parts that are used, with their numbers; None where they do not follow each other in memory, or are unlike."""
    source, axis = shape_of(cut.args[0]), cut.args[-1] if len(cut.args) > (1 if cut.target is aten.unbind.int else 2) else 0
    if math.prod(source[: axis % len(source)]) != 1 or any(user.target is not operator.getitem for user in cut.users):
        return None
    values = cut.meta["val"]
    if len({tuple(value.shape) for value in values}) != 1 or len(values) < 2:
        return None
    return {user: user.args[1] for user in cut.users}


def _allowed(node: Node, columns: int) -> bool:
    """Views of one row, and operations by element whose operands are one row, or one element."""
    if node.op != "call_function" or math.prod(shape_of(node)) != columns:
        return False
    if node.target in (aten.reshape.default, aten.view.default, aten.unsqueeze.default):
        return True
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target is not prims.convert_element_type.default:
        return False
    last = shape_of(node)[-1]
    return last == columns and all(
        math.prod(shape_of(each)) == 1 or (math.prod(shape_of(each)) == columns and shape_of(each)[-1] == columns)
        for each in node.all_input_nodes
    )


def _part(graph: Graph, split: _Split, number: int) -> Node:
    begin, end, product = number * split.columns, (number + 1) * split.columns, split.product
    matrix = call(graph, aten.slice.Tensor, product.matrix, len(product.lead) + 1, begin, end)
    multiplied = call(graph, aten.mul.Tensor, product.row, matrix)
    made = {product.total: call(graph, SUM, multiplied, [-2], **product.total.kwargs)}
    last = made[product.total]

    def operand(node: Any) -> Any:
        if isinstance(node, Node) and node not in made:
            flat = math.prod(shape_of(node)) == product.columns
            made[node] = call(graph, aten.slice.Tensor, node, len(shape_of(node)) - 1, begin, end) if flat else node
        return made[node] if isinstance(node, Node) else node

    for node in split.chain[:-1]:
        if node.target in (aten.reshape.default, aten.view.default, aten.unsqueeze.default):
            made[node] = last
        else:
            last = made[node] = call(graph, node.target, *[operand(each) for each in node.args], **node.kwargs)
    return last
