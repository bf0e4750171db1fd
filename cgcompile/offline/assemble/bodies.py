"""The nodes of a recording with branches and loops, as they come, and their rows: each body behind the bodies that come before it.
Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from cgbundle.tables.recording import ConditionalNode, Edge, KernelNode, Node


@dataclass(slots=True)
class _Graph:
    """The nodes of the recording itself or of a body."""

    nodes: list[Node | _Conditional] = field(default_factory=list)


@dataclass(slots=True)
class _Conditional:
    """A conditional node; `number` is the one that the launches which set its condition name."""

    number: int
    type: str
    bodies: list[_Graph]


class Bodies:
    """Nodes are added to the innermost body that has begun; in each graph they run one after the other."""

    def __init__(self) -> None:
        self._own = _Graph()
        self._open: list[_Conditional] = []

    def add(self, node: Node | _Conditional) -> None:
        self._current().nodes.append(node)

    def begin(self, number: int, type: str) -> None:
        """A conditional node, and its first body."""
        made = _Conditional(number, type, [_Graph()])
        self.add(made)
        self._open.append(made)

    def otherwise(self) -> None:
        """Its second body."""
        self._open[-1].bodies.append(_Graph())

    def end(self) -> None:
        """A second body of nothing is none."""
        conditional = self._open.pop()
        if len(conditional.bodies) > 1 and not conditional.bodies[1].nodes:
            conditional.bodies.pop()

    def rows(self) -> tuple[tuple[Node, ...], tuple[Edge, ...], tuple[int, ...]]:
        """Nodes, edges, and where the bodies begin."""
        graphs = [self._own]
        numbers: dict[int, int] = {}
        rows: list[list[Node | _Conditional]] = []
        for graph in graphs:  # grows while it is walked
            rows.append(graph.nodes)
            for node in graph.nodes:
                if isinstance(node, _Conditional):
                    numbers[node.number] = len(numbers)
                    graphs += node.bodies
        bodies = iter(range(len(graphs) - 1))
        nodes: list[Node] = []
        edges: list[Edge] = []
        begins = []
        for row in rows:
            begins.append(len(nodes))
            edges += _chain(len(nodes), len(nodes) + len(row))
            nodes += [_node(node, numbers, bodies) for node in row]
        return tuple(nodes), tuple(edges), tuple(begins[1:])

    def _current(self) -> _Graph:
        return self._open[-1].bodies[-1] if self._open else self._own


def _chain(begin: int, end: int) -> list[Edge]:
    return [Edge(source=a, target=b, from_port=0, to_port=0, type=0) for a, b in pairwise(range(begin, end))]


def _node(node: Node | _Conditional, numbers: dict[int, int], bodies: Iterator[int]) -> Node:
    if isinstance(node, _Conditional):
        return ConditionalNode(type=node.type, bodies=tuple([next(bodies) for _ in node.bodies]))
    if isinstance(node, KernelNode) and node.handles:
        return replace(node, handles=tuple([replace(each, conditional=numbers[each.conditional]) for each in node.handles]))
    return node
