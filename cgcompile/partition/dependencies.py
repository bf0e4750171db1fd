"""Dependencies of a program: the operations that run in exactly one region, their edges, and the nodes that are recomputed.

Every host region that reads a data-dependent number or a tensor of data-dependent size *recomputes* it.  Such values never cross
between regions.  A node that accesses written memory is not recomputed, because a second result could differ.  It is an ordinary
operation, in one region with all its readers.
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
    """`nodes`: the operations that run in one region each, in the program's order.  `edges`: pairs (earlier, later) of them.

    `together`: sets that must be in one region.  `needs`: the recomputed nodes that each operation needs, in the program's order.
    `writes`: the constraints from writes to memory.  `assertions`: for each assertion that is recomputed too, the values that it
    checks and all nodes that it needs.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[Node, Node], ...]
    together: tuple[tuple[Node, ...], ...]
    needs: dict[Node, tuple[Node, ...]]
    writes: WriteConstraints
    assertions: dict[Node, tuple[frozenset[Node], tuple[Node, ...]]]

    def with_recomputed(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns `nodes` with the recomputed nodes that they need and the assertions about these, in the program's order."""
        selected = {*nodes, *[recomputed for node in nodes for recomputed in self.needs.get(node, ())]}
        for assertion, (sources, needed) in self.assertions.items():
            if sources <= selected:
                selected |= {assertion, *needed}
        graph = next(iter(selected)).graph if selected else None
        return [node for node in graph.nodes if node in selected] if graph is not None else []


def find_dependencies(program: ExportedProgram, known: NodeKinds) -> Dependencies:
    writes = write_constraints(program.graph_module, known)
    fixed: set[Node] = set()  # data-dependent nodes that are not recomputed
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
    ops = set(nodes)
    edges = [(source, node) for node in nodes for user in (node, *needs[node]) for source in user.all_input_nodes if source in ops]
    edges += [(earlier, later) for earlier, later in writes.order if earlier in ops and later in ops]
    together = [*writes.together, *_lists(nodes, known), *[(node, user) for node in fixed for user in node.users if user in ops]]
    return Dependencies(
        nodes=tuple(nodes),
        edges=tuple(dict.fromkeys(edges)),
        together=tuple([tuple([node for node in group if node in ops]) for group in together]),
        needs={node: needs[node] for node in nodes},
        writes=writes,
        assertions=assertions,
    )


def _needs(kinds: NodeKinds, recomputed: set[Node]) -> dict[Node, tuple[Node, ...]]:
    order = {node: place for place, node in enumerate(kinds)}
    needs: dict[Node, tuple[Node, ...]] = {}
    for node in kinds:
        needed: set[Node] = set()
        for source in node.all_input_nodes:
            if source in recomputed:
                needed |= {source, *needs[source]}
        needs[node] = tuple(sorted(needed, key=order.__getitem__))
    return needs


def _assertions(
    kinds: NodeKinds, fixed: set[Node], needs: dict[Node, tuple[Node, ...]]
) -> dict[Node, tuple[frozenset[Node], tuple[Node, ...]]]:
    """Returns the assertions that are recomputed: those whose checked values are all needed by a single operation."""
    together = [set(needs[node]) for node in kinds if needs[node] and kinds[node] is NodeKind.OPERATION]
    assertions = {}
    for node in kinds:
        if kinds[node] is NodeKind.ASSERTION and not fixed.intersection(node.all_input_nodes):
            sources = frozenset([value for value in needs[node] if value.meta.get("unbacked_bindings")]) or frozenset(needs[node])
            if any(sources <= group for group in together):
                assertions[node] = (sources, needs[node])
    return assertions


def _lists(nodes: Iterable[Node], kinds: NodeKinds) -> list[tuple[Node, ...]]:
    """Groups each operation that returns a list of tensors with the readers of the list.  A list cannot cross between regions."""
    return [
        (node, *[user for user in node.users if kinds[user] is NodeKind.OPERATION])
        for node in nodes
        if isinstance(node.meta.get("val"), list | tuple) and kinds[node] is NodeKind.OPERATION
    ]
