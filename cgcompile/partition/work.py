"""The work of a program: the operations that have one place, what depends on what, and what goes wherever it is read.

A number of the host (`.item()`) and a tensor whose size depends on data are *loose*: they have no place of their own, and are
computed in every host region that reads them, from tensors of fixed size.  So they never cross between regions.  Where memory is
written to, computing twice could see different contents: there they are operations like others, tied to all that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

from .roles import Role, Roles
from .writes import ties


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """`nodes`: the operations that have one place, in the program's order.  `edges`: pairs (earlier, later) of them.  `together`:
    sets that must be in one region.  `needs`: the loose nodes that each needs, in the program's order.  `checks`: assertions that
    go wherever the values are that they look at, each with those values and all nodes it needs."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[Node, Node], ...]
    together: tuple[tuple[Node, ...], ...]
    needs: dict[Node, tuple[Node, ...]]
    checks: dict[Node, tuple[frozenset[Node], tuple[Node, ...]]]

    def loose_of(self, node: Node) -> tuple[Node, ...]:
        """The loose nodes that `node` needs."""
        return self.needs.get(node, ())

    def with_loose(self, nodes: Sequence[Node]) -> list[Node]:
        """`nodes` with the loose nodes that they need and the assertions about these, in the program's order."""
        held = {*nodes, *[each for node in nodes for each in self.loose_of(node)]}
        for check, (sources, needed) in self.checks.items():
            if sources <= held:
                held |= {check, *needed}
        graph = next(iter(held)).graph if held else None
        return [node for node in graph.nodes if node in held] if graph is not None else []


def gather(program: ExportedProgram, known: Roles) -> Work:
    """The work of `program`."""
    tied = ties(program.graph_module, known)
    fixed: set[Node] = set()  # loose values that have a place all the same
    for node in known:
        if known[node] is Role.LOOSE and (node in tied.touched or fixed.intersection(node.all_input_nodes)):
            fixed.add(node)
    loose = {node for node in known if known[node] is Role.LOOSE and node not in fixed}
    needs = _needs(known, loose)
    checks = _checks(known, loose, fixed, needs)
    nodes = [
        node for node in known if known[node] is Role.WORK or node in fixed or (known[node] is Role.CHECK and node not in checks)
    ]
    held = set(nodes)
    edges = [(source, node) for node in nodes for each in (node, *needs[node]) for source in each.all_input_nodes if source in held]
    edges += [(earlier, later) for earlier, later in tied.order if earlier in held and later in held]
    together = [*tied.together, *_lists(nodes, known), *[(node, user) for node in fixed for user in node.users if user in held]]
    return Work(
        nodes=tuple(nodes),
        edges=tuple(dict.fromkeys(edges)),
        together=tuple([tuple([node for node in each if node in held]) for each in together]),
        needs={node: needs[node] for node in nodes},
        checks=checks,
    )


def _needs(known: Roles, loose: set[Node]) -> dict[Node, tuple[Node, ...]]:
    order = {node: place for place, node in enumerate(known)}
    found: dict[Node, tuple[Node, ...]] = {}
    for node in known:
        needed: set[Node] = set()
        for source in node.all_input_nodes:
            if source in loose:
                needed |= {source, *found[source]}
        found[node] = tuple(sorted(needed, key=order.__getitem__))
    return found


def _checks(
    known: Roles, loose: set[Node], fixed: set[Node], needs: dict[Node, tuple[Node, ...]]
) -> dict[Node, tuple[frozenset[Node], tuple[Node, ...]]]:
    """The assertions that need no place: all values that one looks at are needed together by an operation."""
    together = [set(needs[node]) for node in known if needs[node] and known[node] is Role.WORK]
    found = {}
    for node in known:
        if known[node] is Role.CHECK and not fixed.intersection(node.all_input_nodes):
            sources = frozenset([each for each in needs[node] if each.meta.get("unbacked_bindings")]) or frozenset(needs[node])
            if any(sources <= each for each in together):
                found[node] = (sources, needs[node])
    return found


def _lists(nodes: Iterable[Node], known: Roles) -> list[tuple[Node, ...]]:
    """A list of tensors cannot cross: what makes one and what takes it apart stay together."""
    return [
        (node, *[user for user in node.users if known[user] is Role.WORK])
        for node in nodes
        if isinstance(node.meta.get("val"), list | tuple) and known[node] is Role.WORK
    ]
