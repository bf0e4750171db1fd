"""An exported program and placements -> as few alternating graph and host regions as the dependencies allow.

Private interfaces (torch 2.11, 2.13): `statically_known_true` of `torch.fx.experimental.symbolic_shapes`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import BuildError
from ..model.device_markers import marker
from .cuts import Kind, Layer, cut
from .roles import Role, Roles, higher_order, is_free, is_view, needs_host, parts, results, roles
from .sizing import weigh
from .units import units
from .work import Work, gather

SMALL = 5
"""Kernels below which a graph between two host regions is not worth its launch, two copies and synchronization: about 20 us,
against 2 to 5 us for each small kernel."""

TIED = "tied to an operation on the host"
LOOSE = "needs a value that depends on data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A region before it is lowered.  `nodes`: names in the program's graph, in its order, of all that is computed there; a number
    of the host, or a tensor whose size depends on data, is computed in every region that reads it, so that it never crosses.
    `operations`: those of `nodes` that compute something (no markers, assertions or arithmetic on numbers); none: the region hands
    its inputs on.  `inputs` and `outputs`: the tensors that cross, by the names of the nodes that make them.  `reason`: why the
    operations of a host region are there, "" for a graph."""

    name: str
    kind: Literal["graph", "host"]
    reason: str
    nodes: tuple[str, ...]
    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """Operations that could have been in a graph and run in the host region `region`: their graph would have been too small."""

    region: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Regions in the order in which they run; there is at least one.  `inputs` and `outputs`: the values of the call in the
    signature's order; an output is made by a region, or is an input by its name."""

    regions: tuple[Part, ...]
    merged: tuple[Merged, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def partition(program: ExportedProgram, placements: Mapping[str, str], small: int = SMALL) -> Partition:
    """The regions of `program`; `placements` are the nodes that must be on the host, with the reasons.

    On the host are also: what reads a number of the host or a tensor whose size depends on data, control flow, copies to the host,
    and whatever writes tie to one of these.  A name inside a module of a higher-order operator places the operator.

    Raises node-unknown, program-unsupported, data-dependent-output.
    """
    known = roles(program)
    placed = _placed(program, known, placements)
    work = gather(program, known)
    reasons = _reasons(program, known, work, placed)
    position = {node: index for index, node in enumerate(work.nodes)}
    edges = [(position[earlier], position[later]) for earlier, later in work.edges]
    together = [*work.together, *_narrowed(work, reasons)]
    grouped = units(len(work.nodes), edges, [[position[node] for node in tied] for tied in together])
    _follow(grouped, work.nodes, reasons)
    layers = _cut(program, work, grouped, edges, reasons, small)
    return _partition(program, known, work, layers, reasons)


def _placed(program: ExportedProgram, known: Roles, placements: Mapping[str, str]) -> dict[Node, str]:
    """Raises node-unknown."""
    names = {node.name: node for node in known}
    inner = {
        each.name: node
        for node in known
        if higher_order(node)
        for part in parts(node, program.graph_module)
        for each in part.graph.nodes
    }
    for name in placements:
        if name not in names and name not in inner:
            raise BuildError("node-unknown", f"the program has no node {name!r}")
        if name in names and names[name].op != "call_function":
            raise BuildError("node-unknown", f"node {name!r} is no operation")
    return {names.get(name) or inner[name]: reason for name, reason in placements.items()}


def _reasons(program: ExportedProgram, known: Roles, work: Work, placed: Mapping[Node, str]) -> dict[Node, str]:
    """Why each operation that must be on the host is there, and of loose values what the placements say."""
    found = {node: reason for node, reason in placed.items() if known[node] is Role.LOOSE}
    for node in work.nodes:
        loose = [source for source in node.all_input_nodes if known[source] is Role.LOOSE]
        if node in placed:
            found[node] = placed[node]
        elif reason := needs_host(node, program.graph_module):
            found[node] = reason
        elif loose or known[node] in (Role.LOOSE, Role.CHECK):
            found[node] = LOOSE
    return found


def _narrowed(work: Work, reasons: Mapping[Node, str]) -> list[tuple[Node, Node]]:
    """Views of a part of a tensor, each with what makes the tensor: if anything must cross, then the part."""
    held = set(work.nodes)
    pairs = [(node.all_input_nodes[0], node) for node in work.nodes if is_view(node) and node not in reasons]
    return [(source, view) for source, view in pairs if source in held and _elements_less(view, source)]


def _elements_less(view: Node, source: Node) -> bool:
    values = view.meta.get("val"), source.meta.get("val")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len(tensors) == 2 and statically_known_true(tensors[0].numel() < tensors[1].numel())


def _follow(grouped: Sequence[Sequence[int]], nodes: Sequence[Node], reasons: dict[Node, str]) -> None:
    """A unit with one operation on the host is there as a whole."""
    for unit in grouped:
        if any(nodes[member] in reasons for member in unit):
            for member in unit:
                reasons.setdefault(nodes[member], TIED)


def _cut(
    program: ExportedProgram,
    work: Work,
    grouped: Sequence[Sequence[int]],
    edges: Iterable[tuple[int, int]],
    reasons: Mapping[Node, str],
    small: int,
) -> list[tuple[Literal["graph", "host"], list[Node]]]:
    home = {member: unit for unit, members in enumerate(grouped) for member in members}
    between = sorted({(home[a], home[b]) for a, b in edges if home[a] != home[b]})
    members = [[work.nodes[member] for member in unit] for unit in grouped]
    kinds = _kinds(members, between, reasons)
    heavy = [sum(weigh(program, node, small) for node in unit) for unit in members]
    layers: Sequence[Layer] = cut(kinds, between, small, heavy)
    order = {node: place for place, node in enumerate(work.nodes)}
    return [
        (layer.kind, sorted([n for unit in layer.operations for n in members[unit]], key=order.__getitem__)) for layer in layers
    ]


def _kinds(members: Sequence[Sequence[Node]], edges: Iterable[tuple[int, int]], reasons: Mapping[Node, str]) -> list[Kind]:
    """Of the units.  A free one that only the host reads and no graph makes is on the host: there it crosses nothing."""
    kinds: list[Kind] = [
        "host" if unit[0] in reasons else "either" if all(is_free(node) for node in unit) else "graph" for unit in members
    ]
    readers: dict[int, list[int]] = {}
    made_by_graph = [kind == "graph" for kind in kinds]
    for earlier, later in sorted(edges, key=lambda edge: edge[1]):
        readers.setdefault(earlier, []).append(later)
        made_by_graph[later] |= kinds[later] == "either" and made_by_graph[earlier]
    for unit in reversed(range(len(members))):
        returned = any(user.op == "output" for node in members[unit] for user in node.users)
        on_host = unit in readers and all(kinds[reader] == "host" for reader in readers[unit])
        if kinds[unit] == "either" and on_host and not returned and not made_by_graph[unit]:
            kinds[unit] = "host"
    return kinds


# --- the records ----------------------------------------------------------------------------------------------


def _partition(
    program: ExportedProgram,
    known: Roles,
    work: Work,
    layers: Sequence[tuple[Literal["graph", "host"], list[Node]]],
    reasons: Mapping[Node, str],
) -> Partition:
    layers = layers or [("graph", [])]
    returned = [value_of(node) for node in results(program)]
    own = [node for node in dict.fromkeys(returned) if known[node] is Role.WEIGHT]
    giving = max([number for number, (kind, _) in enumerate(layers) if kind == "graph"], default=len(layers) - 1)
    everything = [work.with_loose(nodes) for _, nodes in layers]
    maker = {node: number for number, (_, nodes) in enumerate(layers) for node in nodes}
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    reads = [_reads(nodes, known) for nodes in everything]
    made: list[Part] = []
    merged: list[Merged] = []
    for number, ((kind, mine), nodes) in enumerate(zip(layers, everything, strict=True)):
        name = f"{kind}-{1 + sum(part.kind == kind for part in made)}"
        leaving = {node for other, read in enumerate(reads) if other != number for node in read if maker.get(node) == number}
        leaving |= {node for node in returned if maker.get(node) == number}
        outputs = sorted(leaving, key=order.__getitem__) + (own if number == giving else [])
        made.append(
            Part(
                name=name,
                kind=kind,
                reason=_reason([reasons[node] for node in nodes if node in reasons]) if kind == "host" else "",
                nodes=_names(nodes),
                operations=_names([node for node in nodes if _computes(node, known)]),
                inputs=_names(sorted([node for node in reads[number] if maker.get(node) != number], key=order.__getitem__)),
                outputs=_names(outputs),
            )
        )
        lost = [node for node in mine if kind == "host" and node not in reasons and not is_free(node)]
        if lost:
            merged.append(Merged(region=name, nodes=_names(lost)))
    return Partition(
        regions=tuple(made),
        merged=tuple(merged),
        inputs=_names([node for node in program.graph.nodes if known[node] is Role.INPUT]),
        outputs=_names(returned),
    )


def value_of(node: Node) -> Node:
    """The node whose value a node hands on: a marker to_device is another name of what it is given.  (to_host is a value of its
    own: the copy in host memory.)"""
    while marker(node) == "to_device":
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _reads(nodes: Sequence[Node], known: Roles) -> set[Node]:
    """The tensors that a region reads and does not compute loosely itself: what others make, or inputs of the call."""
    held = set(nodes)
    found = {value_of(source) for node in nodes if marker(node) != "to_device" for source in node.all_input_nodes}
    return {node for node in found if node not in held and known[node] in (Role.INPUT, Role.WORK)}


def _computes(node: Node, known: Roles) -> bool:
    if marker(node) or known[node] is Role.CHECK or node.target is operator.getitem:
        return False
    number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
    return not number or node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def _reason(reasons: Sequence[str]) -> str:
    """The reasons of a region's operations, each once, in their order; three at most.  Ours only where the placements give none."""
    different = list(dict.fromkeys(reasons))
    different = [reason for reason in different if reason not in (TIED, LOOSE)] or sorted(different)[:1]
    more = f", and {len(different) - 3} more" if len(different) > 3 else ""
    return ", ".join(different[:3]) + more


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple([node.name for node in nodes])
