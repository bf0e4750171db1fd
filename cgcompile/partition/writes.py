"""Writes to memory: the operations that must stay in one region because of them, and the order that they require.

An exported program is not functional: it holds `z[:, 1] = y` as a view of z and a copy into the view.  A value that crosses between
regions is copied.  So a view and its base may be in different regions only if no later operation writes to either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from .node_kinds import NodeKind, NodeKinds, higher_order, storages, writes_to


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteConstraints:
    """`order`: pairs (earlier, later), besides the edges from an operation to its readers.  `together`: sets of nodes that must be
    in one region.  `touched`: every node that creates, reads or writes memory that is written to.  `written`: for each writing
    node, the nodes that share the memory.  `outliving`: the inputs and weights among these nodes, whose contents outlive the
    call."""

    order: tuple[tuple[Node, Node], ...]
    together: tuple[tuple[Node, ...], ...]
    touched: frozenset[Node]
    written: dict[Node, frozenset[Node]]
    outliving: frozenset[Node]


def write_constraints(module: GraphModule, known: NodeKinds) -> WriteConstraints:
    """Returns the constraints of all writes in `module`'s graph.

    Accesses keep their order with the writes.  The nodes of a memory are its tensor and its views.  If no operation uses an older
    node of the memory after a write, the write makes a new value, which may be in another region.  Otherwise the memory's first
    node, the views and the writes up to the last such write stay together.  For inputs and weights, all other accesses do too.
    """
    nodes = [node for node in module.graph.nodes if known[node] in (*_ACCESSING, *_GIVEN)]
    memory = _memories(nodes)
    targets = {node: [target for target in _targets(node, module) if target in memory] for node in nodes}
    members: dict[Node, list[Node]] = {memory[target]: [] for node_targets in targets.values() for target in node_targets}
    accesses: dict[Node, list[Node]] = {home: [] for home in members}
    for node in nodes:
        if memory[node] in members:
            members[memory[node]].append(node)
        if known[node] in _ACCESSING:
            for home in dict.fromkeys([memory[node], *[memory[operand] for operand in node.all_input_nodes if operand in memory]]):
                if home in members:
                    accesses[home].append(node)
    order: list[tuple[Node, Node]] = []
    together: list[tuple[Node, ...]] = []
    written: dict[Node, set[Node]] = {}
    place = {node: number for number, node in enumerate(module.graph.nodes)}
    for home in members:
        writers = {node for node in accesses[home] if any(memory[target] is home for target in targets.get(node, ()))}
        for node in writers:
            written.setdefault(node, set()).update(members[home])
        order += _order(accesses[home], writers)
        together += _together(members[home], accesses[home], writers, known, place)
    return WriteConstraints(
        order=tuple(order),
        together=tuple(together),
        touched=frozenset([node for accessing in accesses.values() for node in accessing]),
        written={node: frozenset(node_targets) for node, node_targets in written.items()},
        outliving=frozenset([target for node_targets in written.values() for target in node_targets if known[target] in _GIVEN]),
    )


_ACCESSING = (NodeKind.OPERATION, NodeKind.DATA_DEPENDENT)
_GIVEN = (NodeKind.INPUT, NodeKind.WEIGHT)


def _memories(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Maps each node to the first node of its memory.  Nodes share memory if their storage in the export is the same, or if an
    operator's schema declares it."""
    parent: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    first: dict[int, Node] = {}
    for node in nodes:
        parent[node] = node
        same = [first.setdefault(storage, node) for storage in storages(node.meta.get("val"))]
        for other in [*same, *_viewed_inputs(node)]:
            if other in parent and find(other) is not find(node):
                old, new = find(node), find(other)
                parent[old] = new
    return {node: find(node) for node in nodes}


def _viewed_inputs(node: Node) -> list[Node]:
    """Returns the inputs of which a node's result is or may be a view, by the operator's schema and tags.  For example, dropout
    returns its input itself outside of training, although the export recorded a copy."""
    if torch.Tag.maybe_aliasing_or_mutating in getattr(node.target, "tags", ()):
        return node.all_input_nodes[:1]
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(returned.alias_info is not None for returned in schema.returns):
        return []
    operands = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | dict(node.kwargs)
    aliased = [operands.get(argument.name) for argument in schema.arguments if argument.alias_info is not None]
    return [value for value in aliased if isinstance(value, Node)]


def _targets(node: Node, module: GraphModule) -> tuple[Node, ...]:
    """Returns the nodes whose memory a node writes to.  A higher-order operator passes its last arguments to its modules."""
    if not higher_order(node):
        return writes_to(node)
    leaves = tree_leaves((node.args, node.kwargs))
    parts = [getattr(module, str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    written = [leaves[place] for part in parts if isinstance(part, GraphModule) for place in _written_outside(part)]
    return tuple([leaf for leaf in dict.fromkeys(written) if isinstance(leaf, Node)])


def _written_outside(module: GraphModule) -> list[int]:
    """Returns the positions of the placeholders that a module writes to, counted from the last one, which is -1."""
    memory = _memories([node for node in module.graph.nodes if node.op != "output"])
    targets = {memory[target] for node in memory for target in _targets(node, module) if target in memory}
    placeholders = [node for node in memory if node.op == "placeholder"]
    return [place - len(placeholders) for place, node in enumerate(placeholders) if memory[node] in targets]


def _order(accesses: Sequence[Node], writers: set[Node]) -> list[tuple[Node, Node]]:
    pairs: list[tuple[Node, Node]] = []
    after_last_write: list[Node] = []
    last_write: Node | None = None
    for node in accesses:
        if node in writers:
            pairs += [(earlier, node) for earlier in after_last_write]
            after_last_write, last_write = [], node
        elif last_write is not None:
            pairs.append((last_write, node))
        after_last_write.append(node)
    return pairs


def _together(
    members: Sequence[Node], accesses: Sequence[Node], writers: set[Node], kinds: NodeKinds, place: dict[Node, int]
) -> list[tuple[Node, ...]]:
    """Returns the segments of accesses that stay in one region.  A segment begins at the memory's first node, or at a write that
    makes a new value."""
    groups: list[tuple[Node, ...]] = []
    segment: list[Node] = []
    external = any(kinds[member] in _GIVEN for member in members)
    bound = 0

    def close() -> None:
        if bound:
            tied = segment if external else [node for node in segment[:bound] if node in members or node in writers]
            groups.append(tuple(tied))

    for node in accesses:
        if node in writers and _makes_new(node, members, kinds, place):
            close()
            segment, bound, external = [node], 0, False
            continue
        segment.append(node)
        if node in writers:
            bound = len(segment)
    close()
    return groups


def _makes_new(node: Node, members: Sequence[Node], kinds: NodeKinds, place: dict[Node, int]) -> bool:
    """Whether no operation uses an older node of the memory after a write, and no older node is an input or a weight."""
    older = [member for member in members if place[member] < place[node]]
    later = [user for member in older for user in member.users if place[user] > place[node]]
    return not any(kinds[user] in (*_ACCESSING, NodeKind.OUTPUT) for user in later) and not any(
        kinds[member] in _GIVEN for member in older
    )
