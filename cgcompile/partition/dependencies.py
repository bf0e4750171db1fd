"""Dependencies of a program: the operations that run in one region, what depends on what, and what is recomputed where it is read.

A number of the host and a tensor whose size depends on data are *recomputed* in every host region that reads them: they never
cross.  Where memory is written to, a second computation could differ: there they are operations like others, tied to all readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

from .node_kinds import NodeKind, NodeKinds
from .writes import WriteConstraints, write_constraints


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependencies:
    """`nodes`: the operations that run in one region, in the program's order.  `edges`: pairs (earlier, later) of them.

    `together`: sets that must be in one region.  `needs`: the recomputed nodes that each needs, in the program's order.  `writes`:
    the constraints that they follow.  `assertions` go wherever the values are that they look at, each with those values and all
    nodes it needs.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[Node, Node], ...]
    together: tuple[tuple[Node, ...], ...]
    needs: dict[Node, tuple[Node, ...]]
    writes: WriteConstraints
    assertions: dict[Node, tuple[frozenset[Node], tuple[Node, ...]]]

    def with_recomputed(self, nodes: Sequence[Node]) -> list[Node]:
        """`nodes` with the recomputed nodes that they need and the assertions about these, in the program's order."""
        held = {*nodes, *[recomputed for node in nodes for recomputed in self.needs.get(node, ())]}
        for assertion, (sources, needed) in self.assertions.items():
            if sources <= held:
                held |= {assertion, *needed}
        graph = next(iter(held)).graph if held else None
        return [node for node in graph.nodes if node in held] if graph is not None else []


def find_dependencies(program: ExportedProgram, known: NodeKinds) -> Dependencies:
    writes = write_constraints(program.graph_module, known)
    fixed: set[Node] = set()  # depends on data, and is not recomputed all the same
    for node in known:
        if known[node] is NodeKind.DATA_DEPENDENT and (node in writes.touched or fixed.intersection(node.all_input_nodes)):
            fixed.add(node)
    recomputed = {node for node in known if known[node] is NodeKind.DATA_DEPENDENT and node not in fixed}
    needs = _needs(known, recomputed)
    assertions = _assertions(known, fixed, needs)
    nodes = [
        node
        for node in known
        if known[node] is NodeKind.OPERATION or node in fixed or (known[node] is NodeKind.ASSERTION and node not in assertions)
    ]
    held = set(nodes)
    edges = [(source, node) for node in nodes for user in (node, *needs[node]) for source in user.all_input_nodes if source in held]
    edges += [(earlier, later) for earlier, later in writes.order if earlier in held and later in held]
    together = [*writes.together, *_lists(nodes, known), *[(node, user) for node in fixed for user in node.users if user in held]]
    return Dependencies(
        nodes=tuple(nodes),
        edges=tuple(dict.fromkeys(edges)),
        together=tuple([tuple([node for node in group if node in held]) for group in together]),
        needs={node: needs[node] for node in nodes},
        writes=writes,
        assertions=assertions,
    )


def _needs(known: NodeKinds, recomputed: set[Node]) -> dict[Node, tuple[Node, ...]]:
    order = {node: place for place, node in enumerate(known)}
    needs: dict[Node, tuple[Node, ...]] = {}
    for node in known:
        needed: set[Node] = set()
        for source in node.all_input_nodes:
            if source in recomputed:
                needed |= {source, *needs[source]}
        needs[node] = tuple(sorted(needed, key=order.__getitem__))
    return needs


def _assertions(
    known: NodeKinds, fixed: set[Node], needs: dict[Node, tuple[Node, ...]]
) -> dict[Node, tuple[frozenset[Node], tuple[Node, ...]]]:
    """The assertions that go with what they look at: all values that one looks at are needed together by an operation."""
    together = [set(needs[node]) for node in known if needs[node] and known[node] is NodeKind.OPERATION]
    assertions = {}
    for node in known:
        if known[node] is NodeKind.ASSERTION and not fixed.intersection(node.all_input_nodes):
            sources = frozenset([value for value in needs[node] if value.meta.get("unbacked_bindings")]) or frozenset(needs[node])
            if any(sources <= group for group in together):
                assertions[node] = (sources, needs[node])
    return assertions


def _lists(nodes: Iterable[Node], known: NodeKinds) -> list[tuple[Node, ...]]:
    """A list of tensors cannot cross: what makes one and what takes it apart stay together."""
    return [
        (node, *[user for user in node.users if known[user] is NodeKind.OPERATION])
        for node in nodes
        if isinstance(node.meta.get("val"), list | tuple) and known[node] is NodeKind.OPERATION
    ]
