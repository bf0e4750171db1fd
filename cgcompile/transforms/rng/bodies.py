"""Branches and loops that draw random numbers: their bodies get the words of philox.schedule, and loops count iterations."""

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
"""The factor of the word of an outer loop's iteration (an odd number near 2^32 over the golden ratio).  Iterations of two nested
loops have different words if both loops have fewer than 2^15 iterations."""


class Body(NamedTuple):
    """The graph of a body, and two of its inputs: the words that all draws share, and in a loop the number of the iteration."""

    module: GraphModule
    shared: Node
    turn: Node | None


def of_turn(shared: Tensor, turn: Tensor) -> Tensor:
    """Returns the shared words of one iteration.  The highest word of the counter contains the iteration's number, from 1 on.
    Outside of loops this word is 0 in the first 2^32 calls."""
    last = shared.shape[0] - 1
    word = (shared.select(0, last) * MIXED + (turn & MASK) + 1) & MASK
    return torch.cat([shared.narrow(0, 0, last), word.view(1)]).as_strided((last + 1,), (1,))


def hand_to_bodies(node: Node, module: GraphModule, shared: Node, first: Node | None) -> Iterator[Body]:
    """Adds `shared` as an input of every body of a branch or a loop, in place, and yields the bodies.  A loop also carries the
    number of its iteration; `first`: the node of the first number."""
    if higher_order(node) != WHILE:
        predicate, true, false, operands = node.args
        node.args = (predicate, true, false, (*operands, shared))
        for body in bodies(node, module):
            yield Body(body, _input(body, len(list(_inputs(body))), shared), None)
        return
    assert first is not None
    condition, loop_body, carried, additional = node.args[:4]
    node.args = (condition, loop_body, (*carried, first), (*additional, shared), *node.args[4:])
    node.meta["val"] = (*node.meta["val"], first.meta["val"])
    count = len(carried)
    for body, source in [(getattr(module, str(attribute.target)), attribute) for attribute in (condition, loop_body)]:
        turn = _input(body, count, first)
        shared_input = _input(body, len(list(_inputs(body))), shared)
        if source is loop_body:
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
