"""Split-K: replaces matrix products by a batched product over parts of the inner axis and a sum of the float32 results.  Private
interface (torch 2.11, 2.13): the overload `aten.bmm.dtype`, which gives float32 sums of half precision factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..tuning.cost_model import Problem
from .retrace import Retraced

aten = torch.ops.aten

SplitFactor = Callable[[Problem], int]
"""Returns the number of parts of the inner axis; 1 means no split."""


def split_k(retraced: Retraced, arch: str, split_factor: SplitFactor) -> Retraced:
    """Splits every product for which `split_factor` returns more than 1.  Changes the graph of `retraced` in place."""
    graph = retraced.graph.graph
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        a, b = node.args[-2:]
        (m, k), n = a.meta["val"].shape, b.meta["val"].shape[1]
        kind = "mm" if node.target is aten.mm.default else "addmm"
        dtype = str(a.meta["val"].dtype).removeprefix("torch.")
        factor = split_factor(Problem(kind=kind, batch=1, m=m, n=n, k=k, dtype=dtype, arch=arch))
        if factor > 1:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_sum_of_parts(retraced, node, factor))
            graph.erase_node(node)
    retraced.graph.recompile()
    return retraced


def _sum_of_parts(retraced: Retraced, node: Node, factor: int) -> Node:
    """Adds nodes before `node` that compute the same result in parts.  Returns the last of these nodes."""
    a, b = node.args[-2:]
    assert isinstance(a, Node) and isinstance(b, Node)
    (m, k), n, dtype = a.meta["val"].shape, b.meta["val"].shape[1], node.meta["val"].dtype

    def call(target: Any, *args: Any) -> Node:
        new_node = retraced.graph.graph.call_function(target, args)
        with retraced.mode:
            new_node.meta["val"] = target(*torch.fx.map_arg(args, lambda operand: operand.meta["val"]))
        new_node.meta.update({name: node.meta[name] for name in ("stack_trace", "original_aten", "from_node") if name in node.meta})
        return new_node

    left = call(aten.permute.default, call(aten.view.default, a, [m, factor, k // factor]), [1, 0, 2])
    right = call(aten.view.default, b, [factor, k // factor, n])
    product = call(aten.bmm.default, left, right) if dtype == torch.float32 else call(aten.bmm.dtype, left, right, torch.float32)
    total = call(aten.sum.dim_IntList, product, [0])
    if node.target is aten.addmm.default:
        total = call(aten.add.Tensor, total, node.args[0])
    return total if dtype == torch.float32 else call(torch.ops.prims.convert_element_type.default, total, dtype)
