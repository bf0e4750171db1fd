"""Splits an exported program into as few alternating graph and host regions as the placements and dependencies allow.

Private interfaces (torch 2.11, 2.13): `statically_known_true` of `torch.fx.experimental.symbolic_shapes`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import BuildError
from ..model.devices.markers import marker
from .components import components
from .cuts import Kind, Layer, cut
from .dependencies import Dependencies, find_dependencies
from .node_kinds import (
    NodeKind,
    NodeKinds,
    higher_order,
    inner_modules,
    is_free,
    is_view,
    needs_host,
    node_kinds,
    returned_nodes,
)
from .symbolic_sizes import weigh
from .writes import WriteConstraints

SMALL = 5
"""A graph between two host regions moves to the host if it has fewer kernels: a graph needs a launch, two copies and a
synchronization (see `cut`)."""

TIED = "tied to an operation on the host"
DATA = "needs a value that depends on data"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRegion:
    """A region before it is lowered.  `reason`: why the operations of a host region are there, "" for a graph.

    `nodes`: the names of its nodes, in the program's order.  `operations`: those that are more than markers, assertions or
    arithmetic on numbers.  A region without operations passes its inputs on.  `inputs` and `outputs`: the tensors that cross, by
    their nodes' names.

    `written`: the inputs of the call and the buffers that the region writes to, by their placeholders' names.  No other region uses
    them.  A graph writes in place.  A host region takes them as inputs, buffers too, and returns the new values as further outputs.
    """

    name: str
    kind: Literal["graph", "host"]
    reason: str
    nodes: tuple[str, ...]
    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    written: tuple[str, ...]

    @property
    def module_outputs(self) -> tuple[str, ...]:
        """The names of the results of the region's module: `outputs`, and on the host the new values of `written`."""
        return (*self.outputs, *[new_value(name) for name in self.written]) if self.kind == "host" else self.outputs


def new_value(name: str) -> str:
    """The name of the new value of an input or a buffer that a host region writes to.  No node has such a name."""
    return f"{name}.after"


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedGraph:
    """A graph too small to be worth its launch.  Its operations `nodes` run in the host region `region`."""

    region: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """At least one region, in the order of execution.  `inputs` and `outputs`: the call's values in the signature's order.
    `state`: the placeholders of the buffers that the host reads or writes and that the program writes to."""

    regions: tuple[PlannedRegion, ...]
    merged: tuple[MergedGraph, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    state: tuple[str, ...]


def partition(program: ExportedProgram, placements: Mapping[str, str], small: int = SMALL) -> Partition:
    """Returns the regions of `program`.  `placements`: the nodes that must run on the host, with the reasons.

    Readers of data-dependent values, control flow with an `obstacle`, copies to the host, and nodes that must be in one region with
    these run on the host too.  A name in a module of a higher-order operator places the operator.  Raises node-unknown,
    program-unsupported, data-dependent-output.
    """
    known = node_kinds(program)
    placed = _placed(program, known, placements)
    needed = find_dependencies(program, known)
    reasons = _reasons(program, known, needed, placed)
    position = {node: index for index, node in enumerate(needed.nodes)}
    edges = [(position[earlier], position[later]) for earlier, later in needed.edges]
    together = [*needed.together, *_narrowed(needed, reasons)]
    grouped = components(len(needed.nodes), edges, [[position[node] for node in tied] for tied in together])
    _follow(grouped, needed.nodes, reasons)
    layers = _cut(program, needed, grouped, edges, reasons, small)
    return _partition(program, known, needed, layers, reasons)


def _placed(program: ExportedProgram, kinds: NodeKinds, placements: Mapping[str, str]) -> dict[Node, str]:
    """Maps the nodes that `placements` name to their reasons.  Raises node-unknown."""
    names = {node.name: node for node in kinds}
    inner = {
        inner_node.name: node
        for node in kinds
        if higher_order(node)
        for module in inner_modules(node, program.graph_module)
        for inner_node in module.graph.nodes
    }
    for name in placements:
        if name not in names and name not in inner:
            raise BuildError("node-unknown", f"the program has no node {name!r}")
        if name in names and names[name].op != "call_function":
            raise BuildError("node-unknown", f"node {name!r} is not an operation")
    return {names.get(name) or inner[name]: reason for name, reason in placements.items()}


def _reasons(program: ExportedProgram, kinds: NodeKinds, needed: Dependencies, placed: Mapping[Node, str]) -> dict[Node, str]:
    """Maps each operation that must be on the host to the reason.  Includes data-dependent nodes that the placements name."""
    reasons = {node: reason for node, reason in placed.items() if kinds[node] is NodeKind.DATA_DEPENDENT}
    for node in needed.nodes:
        dependent = [source for source in node.all_input_nodes if kinds[source] is NodeKind.DATA_DEPENDENT]
        if node in placed:
            reasons[node] = placed[node]
        elif reason := needs_host(node, program.graph_module):
            reasons[node] = reason
        elif dependent or kinds[node] in (NodeKind.DATA_DEPENDENT, NodeKind.ASSERTION):
            reasons[node] = DATA
    return reasons


def _narrowed(needed: Dependencies, reasons: Mapping[Node, str]) -> list[tuple[Node, Node]]:
    """Pairs each view with its source if the source is larger.  A region that has both can pass on only the view."""
    operations = set(needed.nodes)
    pairs = [(node.all_input_nodes[0], node) for node in needed.nodes if is_view(node) and node not in reasons]
    return [(source, view) for source, view in pairs if source in operations and _elements_less(view, source)]


def _elements_less(view: Node, source: Node) -> bool:
    values = view.meta.get("val"), source.meta.get("val")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len(tensors) == 2 and statically_known_true(tensors[0].numel() < tensors[1].numel())


def _follow(grouped: Sequence[Sequence[int]], nodes: Sequence[Node], reasons: dict[Node, str]) -> None:
    """Places all operations of a component on the host if one of them must be there."""
    for component in grouped:
        if any(nodes[member] in reasons for member in component):
            for member in component:
                reasons.setdefault(nodes[member], TIED)


def _cut(
    program: ExportedProgram,
    needed: Dependencies,
    grouped: Sequence[Sequence[int]],
    edges: Iterable[tuple[int, int]],
    reasons: Mapping[Node, str],
    small: int,
) -> list[tuple[Literal["graph", "host"], list[Node]]]:
    component_of = {member: number for number, members in enumerate(grouped) for member in members}
    between = sorted({(component_of[a], component_of[b]) for a, b in edges if component_of[a] != component_of[b]})
    members = [[needed.nodes[member] for member in component] for component in grouped]
    kinds = _kinds(members, between, reasons)
    heavy = [sum(weigh(program, node, small) for node in component) for component in members]
    layers: Sequence[Layer] = cut(kinds, between, small, heavy)
    order = {node: place for place, node in enumerate(needed.nodes)}
    return [
        (layer.kind, sorted([n for number in layer.operations for n in members[number]], key=order.__getitem__)) for layer in layers
    ]


def _kinds(members: Sequence[Sequence[Node]], edges: Iterable[tuple[int, int]], reasons: Mapping[Node, str]) -> list[Kind]:
    """Returns the kinds of the components.  A free component is "host" if only the host reads it and it needs no value of a
    graph."""
    kinds: list[Kind] = [
        "host" if component[0] in reasons else "either" if all(is_free(node) for node in component) else "graph"
        for component in members
    ]
    readers: dict[int, list[int]] = {}
    from_graph = [kind == "graph" for kind in kinds]
    for earlier, later in sorted(edges, key=lambda edge: edge[1]):
        readers.setdefault(earlier, []).append(later)
        from_graph[later] |= kinds[later] == "either" and from_graph[earlier]
    for number in reversed(range(len(members))):
        returned = any(user.op == "output" for node in members[number] for user in node.users)
        on_host = number in readers and all(kinds[reader] == "host" for reader in readers[number])
        if kinds[number] == "either" and on_host and not returned and not from_graph[number]:
            kinds[number] = "host"
    return kinds


# --- the records ----------------------------------------------------------------------------------------------


def _partition(
    program: ExportedProgram,
    kinds: NodeKinds,
    needed: Dependencies,
    layers: Sequence[tuple[Literal["graph", "host"], list[Node]]],
    reasons: Mapping[Node, str],
) -> Partition:
    layers = layers or [("graph", [])]
    returned = [value_of(node) for node in returned_nodes(program)]
    returned_weights = [node for node in dict.fromkeys(returned) if kinds[node] is NodeKind.WEIGHT]
    returning_layer = max([number for number, (kind, _) in enumerate(layers) if kind == "graph"], default=len(layers) - 1)
    layer_nodes = [needed.with_recomputed(nodes) for _, nodes in layers]
    layer_of = {node: number for number, (_, nodes) in enumerate(layers) for node in nodes}
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    outliving = needed.writes.outliving
    state = {node for node in outliving if kinds[node] is NodeKind.WEIGHT}
    reads = [_reads(nodes, kinds, state if kind == "host" else set()) for (kind, _), nodes in zip(layers, layer_nodes, strict=True)]
    planned_regions: list[PlannedRegion] = []
    merged: list[MergedGraph] = []
    for number, ((kind, layer_operations), nodes) in enumerate(zip(layers, layer_nodes, strict=True)):
        name = f"{kind}-{1 + sum(region.kind == kind for region in planned_regions)}"
        leaving = {node for other, read in enumerate(reads) if other != number for node in read if layer_of.get(node) == number}
        leaving |= {node for node in returned if layer_of.get(node) == number}
        outputs = sorted(leaving, key=order.__getitem__) + (returned_weights if number == returning_layer else [])
        planned_regions.append(
            PlannedRegion(
                name=name,
                kind=kind,
                reason=_reason([reasons[node] for node in nodes if node in reasons]) if kind == "host" else "",
                nodes=_names(nodes),
                operations=_names([node for node in nodes if _computes(node, kinds)]),
                inputs=_names(sorted([node for node in reads[number] if layer_of.get(node) != number], key=order.__getitem__)),
                outputs=_names(outputs),
                written=_names(sorted(_lasting_writes(nodes, needed.writes), key=order.__getitem__)),
            )
        )
        merged_operations = [node for node in layer_operations if kind == "host" and node not in reasons and not is_free(node)]
        if merged_operations:
            merged.append(MergedGraph(region=name, nodes=_names(merged_operations)))
    return Partition(
        regions=tuple(planned_regions),
        merged=tuple(merged),
        inputs=_names([node for node in program.graph.nodes if kinds[node] is NodeKind.INPUT]),
        outputs=_names(returned),
        state=_names(sorted(state.intersection(*[set().union(*reads)]), key=order.__getitem__)),
    )


def _lasting_writes(nodes: Sequence[Node], writes: WriteConstraints) -> set[Node]:
    """Returns the inputs and weights whose memory `nodes` write to."""
    return {target for node in nodes for target in writes.written.get(node, ()) if target in writes.outliving}


def value_of(node: Node) -> Node:
    """Returns the node that computes a node's value.  to_device returns its input; to_host computes a copy."""
    while marker(node) == "to_device":
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _reads(nodes: Sequence[Node], kinds: NodeKinds, state: Collection[Node]) -> set[Node]:
    """Returns the tensors that a region reads from outside: results of other regions, inputs of the call, members of `state`."""
    own_nodes = set(nodes)
    sources = {value_of(source) for node in nodes if marker(node) != "to_device" for source in node.all_input_nodes}
    crossing = NodeKind.INPUT, NodeKind.OPERATION
    return {node for node in sources if node not in own_nodes and (kinds[node] in crossing or node in state)}


def _computes(node: Node, kinds: NodeKinds) -> bool:
    if marker(node) or kinds[node] is NodeKind.ASSERTION or node.target is operator.getitem:
        return False
    number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
    return not number or node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def _reason(reasons: Sequence[str]) -> str:
    """Returns up to three different reasons of a region's operations, in order.  Uses TIED and DATA only if there is no other
    reason."""
    different = list(dict.fromkeys(reasons))
    different = [reason for reason in different if reason not in (TIED, DATA)] or sorted(different)[:1]
    suffix = f", and {len(different) - 3} more" if len(different) > 3 else ""
    return ", ".join(different[:3]) + suffix


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple([node.name for node in nodes])
