"""Finds where two lines that split at a question join again.  From there, both run the same operations."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ...model.user_code import place
from .lines import Line, Slot, nodes_of

Pair = tuple[Any, Any]
"""A value of the main line, and the corresponding value of the other line."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Join:
    """From position `other`, the other line runs the same operations as the main line from position `main`.  `pairs`: their inputs.

    `question`: number of the main line's question at `main`, or None after the last one.  `ends`: only the outputs are common.
    """

    main: int
    other: int
    question: int | None
    pairs: tuple[Pair, ...]
    ends: bool = False


def joins(main: Line, other: Line, parted: int) -> Iterator[Join | None]:
    """Yields the possible joins of two lines that split at question `parted`, the nearest first.  The last one joins only outputs,
    which works for all results of equal structure.  Yields None for a join that needs `other` as the main line."""
    for other_number in range(parted + 1, len(other.questions)):
        for number in range(parted + 1, len(main.questions)):
            if _same_rest(main, number, other, other_number):
                pairs = [(main.live[number][name], other.live[other_number][name]) for name in main.live[number]]
                if (distinct := _distinct(main, other, pairs)) is not None:
                    yield Join(main=main.markers[number], other=other.markers[other_number], question=number, pairs=distinct)
                elif _distinct(other, main, [(right, left) for left, right in pairs]) is not None:
                    yield None
    if (tail := _tail(main, other, parted)) is not None:
        yield tail
    yield Join(main=main.end, other=other.end, question=None, pairs=(), ends=True)


def output(line: Line, slot: Slot) -> Any:
    """Returns the node of an output of a line, or the placeholder of a buffer or input that the line does not write."""
    if slot in line.outputs:
        return line.outputs[slot]
    signature = line.program.graph_signature
    names = {target: name for name, target in signature.inputs_to_buffers.items()}
    name = names.get(slot[1], slot[1])
    return next(node for node in line.program.graph.find_nodes(op="placeholder") if node.name == name)


def _same_rest(main: Line, number: int, other: Line, other_number: int) -> bool:
    """Whether Python's state is the same at two questions, and both lines have the same questions and answers from there on."""
    left, right = main.questions[number], other.questions[other_number]
    if left.spot != right.spot or left.state != right.state or left.names != right.names:
        return False
    if (main.writes or other.writes) and left.memory != right.memory:
        return False
    rests = [
        [(question.spot, question.answer) for question in rest]
        for rest in (main.questions[number:], other.questions[other_number:])
    ]
    return rests[0] == rests[1] and main.result == other.result


def _distinct(main: Line, other: Line, pairs: Sequence[Pair]) -> tuple[Pair, ...] | None:
    """Removes duplicate pairs.  Returns None if one value of the main line corresponds to several values of the other line."""
    partners: dict[Hashable, Hashable] = {}
    distinct: dict[Hashable, Pair] = {}
    for left, right in pairs:
        one, two = main.keys[left], other.keys[right]
        if partners.setdefault(one, two) != two:
            return None
        distinct[one] = left, right
    return tuple(distinct.values())


def _tail(main: Line, other: Line, parted: int) -> Join | None:
    """Returns a join at the longest common end after the last questions: equal operations from the same lines of the model."""
    if main.outputs.keys() != other.outputs.keys() or main.result != other.result:
        return None
    last_questions = [line.markers[-1] if line.markers else -1 for line in (main, other)]
    longest = min(main.end - last_questions[0], other.end - last_questions[1]) - 1
    count = 0
    while count < longest and _alike(main.nodes[-1 - count], other.nodes[-1 - count]):
        count += 1
    for length in range(count, 0, -1):
        if (pairs := _boundary(main, other, length)) is not None:
            return Join(main=main.end - length, other=other.end - length, question=None, pairs=pairs)
    return None


def _alike(left: Node, right: Node) -> bool:
    if left.target != right.target or left.op != "call_function" or place(left) != place(right) or not place(left)[0]:
        return False
    arguments = [repr(map_arg((node.args, node.kwargs), lambda _: None)) for node in (left, right)]
    return arguments[0] == arguments[1] and _meta(left) == _meta(right)


def _boundary(main: Line, other: Line, length: int) -> tuple[Pair, ...] | None:
    """Returns the pairs of values that the last `length` operations of both lines take as inputs, or None if they do not match."""
    first = main.end - length, other.end - length
    pairs: list[Pair] = []
    last_operations = [
        *zip(main.nodes[first[0] :], other.nodes[first[1] :], strict=True),
    ]
    uses = [
        pair
        for left, right in last_operations
        for pair in zip(nodes_of((left.args, left.kwargs)), nodes_of((right.args, right.kwargs)), strict=True)
    ]
    for slot in main.outputs:
        left, right = main.outputs[slot], other.outputs[slot]
        if isinstance(left, Node) != isinstance(right, Node) or (not isinstance(left, Node) and left != right):
            return None
        if isinstance(left, Node):
            uses.append((left, right))
    for left, right in uses:
        offsets = main.at.get(left, -1) - first[0], other.at.get(right, -1) - first[1]
        if max(offsets) >= 0:
            if offsets[0] != offsets[1]:
                return None
        elif main.keys[left] != other.keys[right] and ("get_attr" in (left.op, right.op) or _meta(left) != _meta(right)):
            return None
        else:
            pairs.append((left, right))
    distinct = _distinct(main, other, pairs)
    if distinct is None:
        return None
    tensors = [(left, right) for left, right in distinct if hasattr(left.meta.get("val"), "stride")]
    equal = all(main.keys[left] == other.keys[right] for left, right in distinct if not hasattr(left.meta.get("val"), "stride"))
    return tuple(tensors) if equal else None


def _meta(node: Node) -> Hashable:
    """Returns dtypes, shapes and strides of a node's values.  They must be equal for corresponding nodes."""
    values = tree_leaves(node.meta.get("val"))
    return tuple(
        [
            (str(value.dtype), str(tuple(value.shape)), str(value.stride())) if hasattr(value, "stride") else str(type(value))
            for value in values
        ]
    )
