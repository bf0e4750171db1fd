"""Unrolls scan and map loops with a fixed number of iterations.

Private interface (torch 2.11, 2.13): the order of the arguments of scan and map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .inline import Results, add_call, body_of, fake_mode, inline

LONGEST = 4096
"""Maximum number of nodes of an unrolled loop."""


def scan(module: GraphModule, node: Node) -> Results | None:
    """Unrolls scan(body, init, xs, more): returns the final carries, then the stacked outputs of all iterations."""
    body, init, xs, more = body_of(module, node.args[0]), list(node.args[1]), list(node.args[2]), list(node.args[3])
    iterations = _iterations(body, xs)
    if body is None or not iterations or fake_mode(node) is None:
        return None
    carries, rows = init, []
    for iteration in range(iterations):
        results = inline(module, body, [*carries, *_selected(module, node, xs, iteration), *more], node)
        if results is None:
            return None
        carries, row = list(results[: len(init)]), list(results[len(init) :])
        rows.append(row)
    return [*carries, *_stacked(module, node, rows)]


def map_rows(module: GraphModule, node: Node) -> Results | None:
    """Unrolls map_impl(body, xs, more): returns the stacked outputs of all iterations."""
    body, xs, more = body_of(module, node.args[0]), list(node.args[1]), list(node.args[2])
    iterations = _iterations(body, xs)
    if body is None or not iterations or fake_mode(node) is None:
        return None
    rows = []
    for iteration in range(iterations):
        results = inline(
            module, body, [*[add_call(module, node, torch.ops.aten.select.int, tensor, 0, iteration) for tensor in xs], *more], node
        )
        if results is None:
            return None
        rows.append(list(results))
    return _stacked(module, node, rows)


def _selected(module: GraphModule, node: Node, xs: Sequence[Any], iteration: int) -> list[Node]:
    return [add_call(module, node, torch.ops.aten.select.int, tensor, 0, iteration) for tensor in xs]


def _stacked(module: GraphModule, node: Node, rows: Sequence[Sequence[Any]]) -> list[Node]:
    return [add_call(module, node, torch.ops.aten.stack.default, list(column)) for column in zip(*rows, strict=True)]


def _iterations(body: GraphModule | None, xs: Sequence[Any]) -> int:
    """Returns the number of iterations of a loop over the first axis of `xs`, or 0 if it is not constant or too large."""
    if body is None or not xs:
        return 0
    size = xs[0].meta["val"].shape[0]
    return size if isinstance(size, int) and size * len(body.graph.nodes) <= LONGEST else 0
