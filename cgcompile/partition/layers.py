"""Equal layers of a program: where to cut between them, and which parts differ only in their weights.

A layer is the operations of a numbered module, such as `layers.3` of a ModuleList.  torch.export records the module of every
operation.  Indices that several layers use are computed in each: Inductor must see their bounds in the graph that uses them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

NUMBERED = re.compile(r"^(.*?\.)??\d+(?=\.|$)")
"""Matches the path of the outermost numbered module."""

MANY = 4
"""The least number of equal consecutive layers that are cut apart.  Fewer are lowered together, with kernels fused across them."""

WHOLE = (torch.int32, torch.int64)
"""The dtypes of indices.  Comparisons of indices are bool."""

FEW = 1 << 16
"""The largest number of elements of an index tensor that every layer computes again."""


def pieces(nodes: Sequence[Node]) -> list[list[Node]]:
    """Cuts operations before and after every layer of MANY or more consecutive equal ones.  Every piece also has the operations
    that compute its indices.  Returns one piece if there are no such layers."""
    layers = [(layer, list(rows)) for layer, rows in groupby(_with_layers(nodes), key=lambda row: row[0])]
    alike = [(bool(layer), tuple([str(node.target) for _, node in rows])) for layer, rows in layers]
    cut: list[list[Node]] = [[]]
    for (numbered, _), run in groupby(zip(alike, layers, strict=True), key=lambda row: row[0]):
        parts = [[node for _, node in rows] for _, (_, rows) in run]
        if numbered and len(parts) >= MANY:
            cut += [*parts, []]
        else:
            cut[-1] += [node for part in parts for node in part]
    parts = [part for part in cut if part] or [[]]
    if len(parts) == 1:
        return parts
    indices = _indices(nodes)
    return [_with_indices(part, nodes, indices) for part in parts]


def _with_indices(part: Sequence[Node], nodes: Sequence[Node], indices: set[Node]) -> list[Node]:
    """Returns the operations of the part and those of `nodes` that compute its indices, in order."""
    members, waiting = set(part), list(part)
    while waiting:
        new = indices.intersection(waiting.pop().all_input_nodes) - members
        members |= new
        waiting += new
    return [node for node in nodes if node in members]


def _indices(nodes: Sequence[Node]) -> set[Node]:
    """Returns the operations that compute or compare small integer tensors and read nothing else."""
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
    """Returns a key that is equal for graphs that compute the same.  It has the operations in order and `arguments`' value for
    every input, by name.  Attribute tensors are equal if they are the same object."""
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
