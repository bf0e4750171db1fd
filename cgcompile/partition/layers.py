"""Equal layers of a program: where to cut it so that each is a part of its own, and when two parts are the same but for weights.

A layer is what a numbered module computes, `layers.3` of a ModuleList, as torch.export notes it with every operation.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

NUMBERED = re.compile(r"^(.*?\.)??\d+(?=\.|$)")
"""The path of a numbered module, the outermost one."""

MANY = 4
"""Equal layers one behind the other, from which on they are cut apart.  What is fused across the layers of fewer is worth more than
the time to lower them."""


def pieces(nodes: Sequence[Node]) -> list[list[Node]]:
    """Operations in order, cut before and behind every layer of a run of MANY or more equal ones.  All of them, where there is no
    such run."""
    layers = [(layer, list(rows)) for layer, rows in groupby(_with_layers(nodes), key=lambda row: row[0])]
    alike = [(bool(layer), tuple([str(node.target) for _, node in rows])) for layer, rows in layers]
    cut: list[list[Node]] = [[]]
    for (numbered, _), run in groupby(zip(alike, layers, strict=True), key=lambda row: row[0]):
        parts = [[node for _, node in rows] for _, (_, rows) in run]
        if numbered and len(parts) >= MANY:
            cut += [*parts, []]
        else:
            cut[-1] += [node for part in parts for node in part]
    return [part for part in cut if part] or [[]]


def _with_layers(nodes: Sequence[Node]) -> Iterator[tuple[str, Node]]:
    """Every operation with the path of its layer, "" for none.  One without a note belongs to the layer before it."""
    layer = ""
    for node in nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = list(stack.values())[-1][0]
            found = NUMBERED.match(path)
            layer = found[0] if found else ""
        yield layer, node


def form(module: GraphModule, arguments: Mapping[str, Hashable]) -> Hashable:
    """What two graphs have in common that compute the same: their operations in order, and what `arguments` says of each of their
    inputs, by name.  A tensor that a graph holds is the same for the same object alone."""
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}

    def text(value: Any) -> str:
        return repr(map_arg(value, lambda node: _Number(numbers[node])))

    rows: list[Hashable] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            rows.append(arguments[node.meta["value"]])
        elif node.op == "get_attr":
            rows.append(id(attrgetter(str(node.target))(module)))
        else:
            rows.append((node.op, node.target, text(node.args), text(node.kwargs)))
    return tuple(rows)


class _Number:
    """Stands for a node among arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
