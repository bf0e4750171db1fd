"""Branches and loops that draw random numbers: their bodies get the words that all draws share, and loops count iterations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ...export.higher_order.conditionals import WHILE, bodies, higher_order
from .philox import MASK

MIXED = 0x9E3779B1
"""The factor of the iterations of outer loops (an odd number near 2^32 over the golden ratio).  Iterations of two nested loops have
different words as long as both count below 2^15."""


class Body(NamedTuple):
    """The graph of a body, and its inputs: the words that all draws share, and in a loop the number of the iteration."""

    module: GraphModule
    shared: Node
    turn: Node | None


def of_turn(shared: Tensor, turn: Tensor) -> Tensor:
    """Returns the shared words of one iteration.  The highest word of the counter gets its number, from 1 on.  Outside of loops
    this word is 0 in the first 2^32 calls."""
    last = shared.shape[0] - 1
    word = (shared.select(0, last) * MIXED + (turn & MASK) + 1) & MASK
    return torch.cat([shared.narrow(0, 0, last), word.view(1)]).as_strided((last + 1,), (1,))


def hand_to_bodies(node: Node, module: GraphModule, shared: Node, first: Node | None) -> Iterator[Body]:
    """Adds `shared` as an input of every body of a branch or a loop, in place.  `first`: the number of a loop's first iteration."""
    if higher_order(node) != WHILE:
        predicate, true, false, operands = node.args
        node.args = (predicate, true, false, (*operands, shared))
        for body in bodies(node, module):
            yield Body(body, _input(body, len(list(_inputs(body))), shared), None)
        return
    assert first is not None
    condition, turns, carried, additional = node.args[:4]
    node.args = (condition, turns, (*carried, first), (*additional, shared), *node.args[4:])
    node.meta["val"] = (*node.meta["val"], first.meta["val"])
    count = len(carried)
    for body, source in [(getattr(module, str(attribute.target)), attribute) for attribute in (condition, turns)]:
        turn = _input(body, count, first)
        shared_input = _input(body, len(list(_inputs(body))), shared)
        if source is turns:
            (output,) = body.graph.find_nodes(op="output")
            with body.graph.inserting_before(output):
                next_turn = body.graph.call_function(torch.ops.aten.add.Tensor, (turn, 1))
            next_turn.meta["val"] = turn.meta["val"]
            output.args = ((*_listed(output.args[0]), next_turn),)
        yield Body(body, shared_input, turn)


def _inputs(body: GraphModule) -> list[Node]:
    return list(body.graph.find_nodes(op="placeholder"))


def _input(body: GraphModule, place: int, like: Node) -> Node:
    """Adds an input at position `place` to a body, with the value of another node."""
    inputs = _inputs(body)
    before = inputs[place] if place < len(inputs) else next(node for node in body.graph.nodes if node.op != "placeholder")
    with body.graph.inserting_before(before):
        new_input = body.graph.placeholder("cgcompile_draws")
    new_input.target = new_input.name  # torch.fx has made it unique
    new_input.meta["val"] = like.meta["val"]
    return new_input


def _listed(value: Any) -> list[Any]:
    return tree_leaves(value)
