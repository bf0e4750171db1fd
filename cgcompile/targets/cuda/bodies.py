"""The nodes of a recording with branches and loops, as they come, and their rows: each body behind the bodies that come before it.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from cgcompile.bundle.recordings import ConditionalNode, Edge, KernelNode, Node


@dataclass(slots=True)
class _Graph:
    """The nodes of the recording itself or of a body, edges by positions in it, and the nodes that what comes next waits for."""

    nodes: list[Node | _Conditional] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Conditional:
    """A conditional node; `number` is the one that the launches which set its condition name."""

    number: int
    type: str
    bodies: list[_Graph]


class Bodies:
    """Nodes are added to the innermost body that has begun, and run behind everything that was added to it before."""

    def __init__(self) -> None:
        self._own = _Graph()
        self._open: list[_Conditional] = []

    def add(self, nodes: Sequence[Node | _Conditional], edges: Sequence[Edge] | None = None) -> None:
        """`edges` join the nodes, by their positions; None: they run one after the other."""
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
        """A conditional node, and its first body."""
        conditional = _Conditional(number, type, [_Graph()])
        self.add([conditional])
        self._open.append(conditional)

    def next_body(self) -> None:
        """Its next body."""
        self._open[-1].bodies.append(_Graph())

    def end(self) -> None:
        """A branch's second body of nothing is none."""
        conditional = self._open.pop()
        if conditional.type == "if" and len(conditional.bodies) == 2 and not conditional.bodies[1].nodes:
            conditional.bodies.pop()

    def rows(self) -> tuple[tuple[Node, ...], tuple[Edge, ...], tuple[int, ...]]:
        """Nodes, edges, and where the bodies begin."""
        graphs = [self._own]
        numbers: dict[int, int] = {}
        for graph in graphs:  # grows while it is walked
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
        return self._open[-1].bodies[-1] if self._open else self._own


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
