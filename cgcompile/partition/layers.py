"""Equal layers of a program: where to cut between them, and which parts differ only in their weights.

A layer is the operations of a numbered module, such as `layers.3` of a ModuleList.  torch.export records the module of every
operation.  Every layer computes the index tensors that it uses, because Inductor must see their bounds in the same graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

NUMBERED = re.compile(r"^(.*?\.)??\d+(?=\.|$)")
"""Matches the path of the outermost numbered module."""

MANY = 4
"""The smallest number of equal consecutive layers that are lowered separately.  Fewer are lowered together."""

WHOLE = (torch.int32, torch.int64)
"""The dtypes of indices.  Comparisons of indices are bool."""

VIEW, PRODUCT, ELEMENTS, OTHER = "view", "product", "elements", "other"
"""Kinds of operations: a view; a matrix product or a convolution; any other operator of ATen except attention (most are elementwise
operations and reductions, which Inductor fuses); attention and operators of other libraries."""

FUSED = {(ELEMENTS, ELEMENTS): 4, (PRODUCT, ELEMENTS): 4, (ELEMENTS, PRODUCT): 1}
"""The cost of a cut between an operation and a reader of its result, by their kinds.  Inductor often fuses a product with the next
operation, and seldom with the previous one."""

PRODUCTS = (
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm", "_grouped_mm", "_scaled_mm",
)  # fmt: skip

RESHAPES = ("flatten", "reshape", "unflatten", "_unsafe_view")
"""Operators that usually return a view."""

INDEXING = ("embedding", "gather", "index", "put", "scatter", "take", "unpool")
"""Parts of the names of operators that read or write at indices."""

FEW = 1 << 16
"""The largest number of elements of an index tensor that every layer computes again."""


def pieces(nodes: Sequence[Node]) -> list[list[Node]]:
    """Cuts each of MANY or more consecutive equal layers at the same position.  So the pieces between two cuts are equal.  A piece
    may have the end of one layer and the beginning of the next, and also has the operations that compute its indices.  Returns one
    piece if there are no such layers."""
    layers = [(layer, list(rows)) for layer, rows in groupby(_with_layers(nodes), key=lambda row: row[0])]
    alike = [(bool(layer), tuple([str(node.target) for _, node in rows])) for layer, rows in layers]
    cut: list[list[Node]] = [[]]
    for (numbered, _), run in groupby(zip(alike, layers, strict=True), key=lambda row: row[0]):
        parts = [[node for _, node in rows] for _, (_, rows) in run]
        if numbered and len(parts) >= MANY:
            at = best_cut(parts[:3])
            cut[-1] += parts[0][:at]
            cut += [[*part[at:], *following[:at]] for part, following in zip(parts, [*parts[1:], []], strict=True)]
            if at == 0:
                cut.append([])
        else:
            cut[-1] += [node for part in parts for node in part]
    parts = [part for part in cut if part] or [[]]
    if len(parts) == 1:
        return parts
    parts = _with_elements(parts)
    indices = _indices(nodes)
    return [_with_indices(part, nodes, indices) for part in parts]


def has_equal_layers(module: GraphModule) -> bool:
    """Whether `pieces` cuts the operations of a graph.  False if it has complex numbers: only real tensors cross between parts."""
    values = [leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        return False
    return len(pieces([node for node in module.graph.nodes if node.op == "call_function"])) > 1


def best_cut(layers: Sequence[Sequence[Node]]) -> int:
    """Returns the position in a layer before which a cut separates the fewest operations that Inductor would compute in one kernel,
    for example after the attention.  A cut between two layers would separate the last sum of one layer from the norm of the next.
    Among cuts of equal cost, takes one that the fewest values cross.  `layers`: the operations of three consecutive equal
    layers."""
    nodes = [node for layer in layers for node in layer]
    numbers = {node: number for number, node in enumerate(nodes)}
    apart = _apart(nodes, numbers)
    begin, size = len(layers[0]), len(layers[1])
    costs, values = [0] * len(nodes), [0] * len(nodes)
    for number, node in enumerate(nodes):
        if _kind(node) == VIEW:
            continue
        readers = [reader for reader in _readers(node) if reader in numbers]
        for reader in readers:
            if not apart[reader] >> number & 1:
                for position in range(number + 1, numbers[reader] + 1):
                    costs[position] += FUSED.get((_kind(node), _kind(reader)), 0)
        for position in range(number + 1, max((numbers[reader] for reader in readers), default=number) + 1):
            values[position] += 1
    return min(range(size), key=lambda at: (costs[begin + at], values[begin + at], at))


def _apart(nodes: Sequence[Node], numbers: Mapping[Node, int]) -> dict[Node, int]:
    """Returns, for every operation, the operations that cannot be in its kernel, because a product or an operation of kind OTHER
    lies between them.  Each set is an integer: bit n is 1 if it contains the operation whose number is n."""
    before: dict[Node, int] = {}
    apart: dict[Node, int] = {}
    for node in nodes:
        before[node] = apart[node] = 0
        for source in node.all_input_nodes:
            if source in numbers:
                before[node] |= before[source] | 1 << numbers[source]
                apart[node] |= apart[source] | (before[source] if _kind(source) in (PRODUCT, OTHER) else 0)
    return apart


def _readers(node: Node) -> Iterator[Node]:
    """Yields the operations that read a value or a view of it, without the views."""
    for user in node.users:
        if _kind(user) == VIEW:
            yield from _readers(user)
        else:
            yield user


def _kind(node: Node) -> str:
    name = _name(node)
    if node.target is operator.getitem or name in RESHAPES or (name and node.target.is_view):
        return VIEW
    if name in PRODUCTS:
        return PRODUCT
    return ELEMENTS if name and "scaled_dot_product" not in name else OTHER


def _name(node: Node) -> str:
    """Returns the name of an operator of ATen, without its overload; "" for any other target."""
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if known else ""


def _with_elements(parts: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Returns the parts after moving every operation that takes an element of a tuple to the part that computes the tuple.  A tuple
    cannot cross a cut, only tensors and numbers can."""
    numbers = {node: number for number, part in enumerate(parts) for node in part}
    for part in parts:
        for node in part:
            if node.target is operator.getitem:
                numbers[node] = numbers.get(node.args[0], numbers[node])
    moved: list[list[Node]] = [[] for _ in parts]
    for node, number in numbers.items():
        moved[number].append(node)
    return [part for part in moved if part]


def _with_indices(part: Sequence[Node], nodes: Sequence[Node], indices: set[Node]) -> list[Node]:
    """Returns the operations of the part and those of `nodes` that compute its indices, in order."""
    members, waiting = set(part), [node for node in part if any(word in _name(node) for word in INDEXING)]
    while waiting:
        new = indices.intersection(waiting.pop().all_input_nodes) - members
        members |= new
        waiting += new
    return [node for node in nodes if node in members]


def _indices(nodes: Sequence[Node]) -> set[Node]:
    """Returns the operations that compute or compare small integer tensors, and read only such tensors and integers."""
    indices: set[Node] = set()
    for node in nodes:
        value, target = node.meta.get("val"), node.target
        functional = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        small = isinstance(value, torch.Tensor) and value.dtype in (*WHOLE, torch.bool) and value.numel() <= FEW
        if functional and small and all(source in indices or _is_whole(source) for source in node.all_input_nodes):
            indices.add(node)
    return indices


def _is_whole(node: Node) -> bool:
    """Whether a value is an integer or an integer tensor."""
    value = node.meta.get("val")
    return value.dtype in WHOLE if isinstance(value, torch.Tensor) else isinstance(value, int | torch.SymInt)


def _with_layers(nodes: Sequence[Node]) -> Iterator[tuple[str, Node]]:
    """Yields every operation with the path of its layer, or "".  An operation without a module belongs to the layer before it."""
    layer = ""
    for node in nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = list(stack.values())[-1][0]
            layer = match[0] if (match := NUMBERED.match(path)) else ""
        yield layer, node


def form(module: GraphModule, arguments: Mapping[str, Hashable]) -> Hashable:
    """Returns a key.  Graphs with equal keys compute the same.  It has the operations in order, and for every input the entry of
    `arguments` for the name of its value (`meta["value"]`).  Attribute tensors are equal if they are the same object."""
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}

    def text(value: Any) -> str:
        return repr(map_arg(value, lambda node: f"%{numbers[node]}"))

    rows: list[Hashable] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            rows.append(arguments[node.meta["value"]])
        elif node.op == "get_attr":
            rows.append(id(attrgetter(str(node.target))(module)))
        else:
            rows.append((node.op, node.target, text(node.args), text(node.kwargs)))
    return tuple(rows)
