"""Repeats norms and softmaxes before a product of one row, so that the product's kernel computes them for every column.

A product of one row is a sum for every column (decompositions.py).  Computing a short row again costs less than a kernel: one
kernel less in a chain saves 2.9 us on an H100 (torch 2.11), and the repeated work takes 0.75.  Inductor only fuses reductions of
equal shapes, so the row is expanded to one row for each column.  The expanded rows are never stored.

Private interfaces (torch 2.11, 2.13): the operators of `torch._inductor.inductor_prims`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch.fx import Graph, Node

from .products import SUM, Product, call, one_product, shape_of

MOST = 8192
"""The most columns of a matrix.  For more columns, the repeated work takes longer than a kernel's launch."""

aten, prims = torch.ops.aten, torch.ops.prims

SOFTMAX = prims.prepare_softmax_online.default

PAIRS = {aten.var_mean.correction, SOFTMAX}
"""Reductions with two results for every row."""

REDUCTIONS = {*PAIRS, aten.mean.dim, aten.amax.default, SUM}

VIEWS = {
    aten.expand.default, aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim,
    prims.inductor_force_stride_order.default,
}  # fmt: skip
"""Operations that keep the elements and their order, if `_is_rows` holds before and after."""


def repeat_reductions(graph: Graph) -> None:
    """Changes the graph in place.  Products that read one row are changed together, or not at all."""
    groups: dict[tuple[Node, int, int], list[Product]] = {}
    for node in graph.find_nodes(op="call_function", target=SUM):
        product = one_product(node)
        if product is not None:
            groups.setdefault((_source(product), product.rows, product.length), []).append(product)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for products in groups.values():
        cone = sorted(_cone(products), key=places.__getitem__)
        if any(node.target in REDUCTIONS for node in cone) and all(product.columns <= MOST for product in products):
            by_shape: dict[tuple[int, ...], dict[Any, Any]] = {}
            for product in products:
                shared = by_shape.setdefault((*product.lead, product.columns), {})
                with graph.inserting_before(min((product.total for product in products), key=places.__getitem__)):
                    row = _repeated(graph, product, cone, shared)
                with graph.inserting_before(product.total):
                    _replace(graph, product, row)
            for node in [node for product in products for node in (product.total, product.total.args[0])] + cone[::-1]:
                graph.erase_node(node)


def _source(product: Product) -> Node:
    """Returns the row without views and conversions.  Other products may read it too."""
    node = product.row
    while len(node.users) == 1 and (node.target in VIEWS or node.target is prims.convert_element_type.default):
        if not _allowed(node, product):
            break
        node = node.args[0]
    return node


def _cone(products: Sequence[Product]) -> set[Node]:
    """Returns the nodes that compute nothing but the row of the products: elementwise operations, reductions of rows, and views.
    The other factor is excluded, although it may be computed from the same row (attention of a single token)."""
    cone, factors = {product.total.args[0] for product in products}, {product.matrix for product in products}
    waiting = [product.row for product in products]
    while waiting:
        node = waiting.pop()
        if node not in cone and node not in factors and cone.issuperset(node.users) and _allowed(node, products[0]):
            cone.add(node)
            waiting += [node for member in cone for node in member.all_input_nodes]
    return cone - {product.total.args[0] for product in products}


def _allowed(node: Node, product: Product) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return node.args[0].target in PAIRS
    if node.target in REDUCTIONS:
        axes = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
        keepdim = node.target is SOFTMAX or node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2])
        return bool(keepdim) and _kind(node.args[0], product) == "row" and list(axes) in ([-1], [len(shape_of(node.args[0])) - 1])
    if node.target in VIEWS:
        return _is_rows(node.args[0], product) and _is_rows(node, product)
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target is not prims.convert_element_type.default:
        return False
    return _kind(node, product) in ("row", "statistic") and all(_kind(operand, product) for operand in node.all_input_nodes)


def _kind(node: Node, product: Product) -> str:
    """Classifies a value: a "row" for each row of the product, a "statistic" of each row, "shared" by all, one "element", or ""."""
    shape = shape_of(node)
    if len(shape) > 1 and shape[-1] == product.length and math.prod(shape) == product.rows * product.length:
        return "row"
    if len(shape) > 1 and shape[-1] == 1 and math.prod(shape) == product.rows:
        return "statistic"
    if shape[-1:] == (product.length,) and math.prod(shape) == product.length:
        return "shared"
    return "element" if math.prod(shape) == 1 else ""


def _is_rows(node: Node, product: Product) -> bool:
    """Whether a value has the elements of the rows, in order: (..., length) or (..., length, 1)."""
    shape = shape_of(node)
    last = shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
    return math.prod(shape) == product.rows * product.length and last[-1:] == (product.length,)


def _repeated(graph: Graph, product: Product, cone: Collection[Node], val_map: dict[Any, Any]) -> Node:
    """Returns the row for every column, (*lead, columns, length).  `val_map`: new nodes by the old ones."""

    def operand(node: Any) -> Any:
        if not isinstance(node, Node):
            return node
        if node not in val_map:
            sizes = {
                "row": [*product.lead, 1, product.length],
                "statistic": [*product.lead, 1, 1],
                "shared": [product.length],
                "element": [],
            }
            kind = "row" if _is_rows(node, product) else _kind(node, product)
            val_map[node] = call(graph, aten.reshape.default, node, sizes[kind])
            if kind == "row":
                val_map[node] = call(graph, aten.expand.default, val_map[node], [*product.lead, product.columns, product.length])
        return val_map[node]

    for node in cone:
        if node in val_map:
            continue
        first = node.args[0]
        if node.target in VIEWS:
            val_map[node] = operand(first)
        elif node.target is operator.getitem:
            val_map[node] = val_map[first][node.args[1]]
        elif node.target is SOFTMAX:
            largest = call(graph, aten.amax.default, operand(first), [-1], True)
            shifted = call(graph, aten.sub.Tensor, operand(first), largest)
            val_map[node] = largest, call(graph, SUM, call(graph, aten.exp.default, shifted), [-1], True)
        elif node.target in PAIRS:
            pair = call(graph, node.target, operand(first), [-1], **{**node.kwargs, "keepdim": True})
            val_map[node] = tuple([call(graph, operator.getitem, pair, place) for place in (0, 1)])
        elif node.target in REDUCTIONS:
            kwargs = {name: value for name, value in node.kwargs.items() if name != "keepdim"}
            val_map[node] = call(graph, node.target, operand(first), [-1], True, **kwargs)
        else:
            val_map[node] = call(graph, node.target, *[operand(argument) for argument in node.args], **node.kwargs)
    return operand(product.row)


def _replace(graph: Graph, product: Product, row: Node) -> None:
    axes = len(product.lead)
    transposed = call(graph, aten.permute.default, product.matrix, [*range(axes), axes + 1, axes])
    multiplied = call(graph, aten.mul.Tensor, row, transposed)
    total = call(graph, SUM, multiplied, [-1], **product.total.kwargs)
    total.meta = {**product.total.meta, **total.meta}
    product.total.replace_all_uses_with(total)
