"""Norms and softmaxes in front of a product of one row, computed again by every program of the product: a pass of Inductor's.

A product of one row is a sum for every column (decompositions.py).  What makes the row, where it is short, costs less than a kernel
of its own: a launch behind another takes more than a microsecond, of which such a kernel computes half.  Inductor fuses reductions
of equal shapes alone, so the row is expanded to a copy for every column, which is never stored.

Private interfaces (torch 2.11, 2.13): the option `post_grad_custom_post_pass`, `CustomGraphPass`, `get_hash_for_files`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

LONGEST = 1024
"""Elements of a row, at most: a longer one does not fit into the registers of one program."""

MOST = 8192
"""Columns of a matrix, at most: a larger one takes many times what a kernel's launch does.  It makes no difference then."""

aten, prims = torch.ops.aten, torch.ops.prims

SUM = aten.sum.dim_IntList

PAIRS = {aten.var_mean.correction, prims.prepare_softmax_online.default}
"""Reductions that give two values for every row; the second of these: the largest element, and the sum of the exponentials of what
each is less than that."""

REDUCTIONS = {*PAIRS, aten.mean.dim, aten.amax.default, SUM}

VIEWS = {
    aten.expand.default, aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim,
    prims.inductor_force_stride_order.default,
}  # fmt: skip
"""Views that keep the elements of a row and their order, where the last axis or that before it is the row."""


class RepeatReductions(CustomGraphPass):
    """The pass, for the option above."""

    def __call__(self, graph: Graph) -> None:
        repeat_reductions(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def repeat_reductions(graph: Graph) -> None:
    """Changes the graph in place."""
    for node in list(graph.find_nodes(op="call_function", target=SUM)):
        _repeat(graph, node)


def _repeat(graph: Graph, total: Node) -> None:
    """Where `total` is a product of one row (..., 1, k) by a matrix, with reductions in what makes the row."""
    product, axes = total.args[:2]
    if list(axes) != [-2] or product.target is not aten.mul.Tensor or len(product.users) > 1:
        return
    row, matrix = product.args
    if not (isinstance(row, Node) and isinstance(matrix, Node)):
        return
    *lead, length, columns = product.meta["val"].shape
    if not all(isinstance(size, int) for size in (*lead, length, columns)) or not 1 < length <= LONGEST:
        return
    if list(_shape(row)) != [*lead, length, 1] or list(_shape(matrix)) != [*lead, length, columns]:
        return
    rows = 1
    for size in lead:
        rows *= size
    cone = _cone(row, product, rows, length)
    if columns > MOST or not any(each.target in REDUCTIONS for each in cone):
        return
    made: dict[Node, Node] = {}
    pairs: dict[Node, tuple[Node, ...]] = {}

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*_values(args), **_values(kwargs))
        return node

    def operand(given: Any) -> Any:
        if not isinstance(given, Node):
            return given
        if given not in made:
            kind = _kind(given, rows, length)
            if kind == "row":
                view = call(aten.reshape.default, given, [*lead, 1, length])
                made[given] = call(aten.expand.default, view, [*lead, columns, length])
            elif kind == "statistic":
                made[given] = call(aten.reshape.default, given, [*lead, 1, 1])
            else:
                made[given] = call(aten.reshape.default, given, [length] if kind == "shared" else [])
        return made[given]

    with graph.inserting_before(total):
        for node in cone:
            if node.target in VIEWS:
                made[node] = operand(node.args[0])
            elif node.target is operator.getitem:
                made[node] = pairs[node.args[0]][node.args[1]]
            elif node.target is prims.prepare_softmax_online.default:
                source = operand(node.args[0])
                most = call(aten.amax.default, source, [-1], True)
                pairs[node] = most, call(SUM, call(aten.exp.default, call(aten.sub.Tensor, source, most)), [-1], True)
            elif node.target in PAIRS:
                pair = call(node.target, operand(node.args[0]), [-1], **node.kwargs)
                pairs[node] = tuple([call(operator.getitem, pair, number) for number in (0, 1)])
            elif node.target in REDUCTIONS:
                made[node] = call(node.target, operand(node.args[0]), [-1], **{**node.kwargs, "keepdim": True})
            else:
                made[node] = call(node.target, *[operand(each) for each in node.args], **node.kwargs)
        turned = [*range(len(lead)), len(lead) + 1, len(lead)]
        new = call(SUM, call(aten.mul.Tensor, made[row], call(aten.permute.default, matrix, turned)), [-1], **total.kwargs)
    total.replace_all_uses_with(new)
    for node in [total, product, *reversed(cone)]:
        graph.erase_node(node)


def _cone(row: Node, product: Node, rows: int, length: int) -> list[Node]:
    """What makes a row and nothing else, in order: operations by element over rows of `length`, reductions of them, and views."""
    found = {product}
    waiting, order = [row], []
    while waiting:
        node = waiting.pop()
        if node in found or not all(user in found for user in node.users) or not _allowed(node, rows, length):
            continue
        found.add(node)
        order.append(node)
        waiting += node.all_input_nodes
        waiting += [each for seen in order for each in seen.all_input_nodes if each not in found and set(each.users) <= found]
    place = {node: number for number, node in enumerate(product.graph.nodes)}
    return sorted(order, key=place.__getitem__)


def _allowed(node: Node, rows: int, length: int) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return node.args[0].target in PAIRS
    if node.target in REDUCTIONS:
        source = _shape(node.args[0])
        axes = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        last = list(axes) in ([-1], [len(source) - 1])
        kept = node.target is prims.prepare_softmax_online.default or node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2])
        return last and bool(kept) and source[-1] == length and _size(source) == rows * length
    if node.target in VIEWS:
        shapes = _shape(node.args[0]), _shape(node)
        return all(_size(shape) == rows * length and _row_last(shape, length) for shape in shapes)
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target is not prims.convert_element_type.default:
        return False
    kinds = [_kind(each, rows, length) for each in node.all_input_nodes]
    return all(kinds) and _kind(node, rows, length) in ("row", "statistic")


def _kind(node: Node, rows: int, length: int) -> str:
    """What a value is: a "row" for each of `rows`, a "statistic" of each, "shared" by all rows, one "element"; else ""."""
    shape = _shape(node)
    size = _size(shape)
    if size == rows * length and len(shape) > 1 and shape[-1] == length:
        return "row"
    if size == rows and len(shape) > 1 and shape[-1] == 1:
        return "statistic"
    if size == length and shape[-1] == length:
        return "shared"
    return "element" if size == 1 else ""


def _row_last(shape: Any, length: int) -> bool:
    return shape[-1] == length or (shape[-1] == 1 and shape[-2] == length)


def _shape(node: Node) -> Any:
    value = node.meta["val"]
    return value.shape if isinstance(value, torch.Tensor) else ()


def _size(shape: Any) -> int:
    made = 1
    for each in shape:
        made *= each
    return made


def _values(given: Any) -> Any:
    return torch.fx.node.map_aggregate(given, lambda each: each.meta["val"] if isinstance(each, Node) else each)
