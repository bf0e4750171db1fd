"""Numbers of elements in a program."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def spell_counts(graph: Graph) -> None:
    """Numbers of elements as products of sizes: torch.compile of 2.11 takes no operator that gives a number but `sym_size`."""
    for node in graph.find_nodes(op="call_function", target=aten.sym_numel.default):
        (tensor,) = node.args
        value = tensor.meta["val"]
        with graph.inserting_before(node):
            total: Any = 1
            for axis, size in enumerate(value.shape):
                factor: Any = size
                if isinstance(size, torch.SymInt):
                    factor = graph.call_function(aten.sym_size.int, (tensor, axis))
                    factor.meta = {**node.meta, "val": size}
                if isinstance(total, int) and isinstance(factor, int):
                    total *= factor
                elif isinstance(total, int) and total == 1:
                    total = factor
                else:
                    made = graph.call_function(operator.mul, (total, factor))
                    made.meta = {**node.meta, "val": _value_of(total) * _value_of(factor)}
                    total = made
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _value_of(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument
