"""Collects the nodes of a recording with branches and loops, and returns them as rows, with the bodies in
breadth-first order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from cgcompile.bundle.recordings import ConditionalNode, Edge, KernelNode, Node


@dataclass(slots=True)
class _Graph:
    """The nodes of the recording or of a body, the edges by position, and the nodes that the next node depends on."""

    nodes: list[Node | _Conditional] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Conditional:
    """A conditional node.  Launches that set its condition refer to it by `number`."""

    number: int
    type: str
    bodies: list[_Graph]


class Bodies:
    """Adds nodes to the innermost open body.  New nodes run after all nodes that the body already has."""

    def __init__(self) -> None:
        self._root = _Graph()
        self._open: list[_Conditional] = []

    def add(self, nodes: Sequence[Node | _Conditional], edges: Sequence[Edge] | None = None) -> None:
        """Adds nodes.  `edges` connect them by their positions in `nodes`; None: they run one after the other."""
        if not nodes:
            return
        graph = self._current()
        begin = len(graph.nodes)
        inner_edges = _chain(len(nodes)) if edges is None else list(edges)
        ends = {edge.source for edge in inner_edges}, {edge.target for edge in inner_edges}
        first = [begin + i for i in range(len(nodes)) if i not in ends[1]]
        graph.edges += [_edge(a, b) for a in graph.last for b in first]
        graph.edges += [_moved(edge, begin) for edge in inner_edges]
        graph.nodes += nodes
        graph.last = [begin + i for i in range(len(nodes)) if i not in ends[0]]

    def begin(self, number: int, type: str) -> None:
        """Adds a conditional node and opens its first body."""
        conditional = _Conditional(number, type, [_Graph()])
        self.add([conditional])
        self._open.append(conditional)

    def next_body(self) -> None:
        """Opens the next body of the current conditional node."""
        self._open[-1].bodies.append(_Graph())

    def end(self) -> None:
        """Closes the current conditional node.  Drops an empty second body of a branch."""
        conditional = self._open.pop()
        if conditional.type == "if" and len(conditional.bodies) == 2 and not conditional.bodies[1].nodes:
            conditional.bodies.pop()

    def rows(self) -> tuple[tuple[Node, ...], tuple[Edge, ...], tuple[int, ...]]:
        """Returns the nodes, the edges, and the position of the first node of each body."""
        graphs = [self._root]
        numbers: dict[int, int] = {}
        for graph in graphs:  # the loop appends to the list
            for node in graph.nodes:
                if isinstance(node, _Conditional):
                    numbers[node.number] = len(numbers)
                    graphs += node.bodies
        bodies = iter(range(len(graphs) - 1))
        nodes: list[Node] = []
        edges: list[Edge] = []
        begins = []
        for graph in graphs:
            begins.append(len(nodes))
            edges += [_moved(edge, len(nodes)) for edge in graph.edges]
            nodes += [_node(node, numbers, bodies) for node in graph.nodes]
        return tuple(nodes), tuple(edges), tuple(begins[1:])

    def _current(self) -> _Graph:
        return self._open[-1].bodies[-1] if self._open else self._root


def _chain(count: int) -> list[Edge]:
    return [_edge(a, b) for a, b in pairwise(range(count))]


def _edge(source: int, target: int) -> Edge:
    return Edge(source=source, target=target, from_port=0, to_port=0, type=0)


def _moved(edge: Edge, by: int) -> Edge:
    return replace(edge, source=edge.source + by, target=edge.target + by) if by else edge


def _node(node: Node | _Conditional, numbers: dict[int, int], bodies: Iterator[int]) -> Node:
    if isinstance(node, _Conditional):
        return ConditionalNode(type=node.type, bodies=tuple([next(bodies) for _ in node.bodies]))
    if isinstance(node, KernelNode) and node.handles:
        return replace(node, handles=tuple([replace(handle, conditional=numbers[handle.conditional]) for handle in node.handles]))
    return node
