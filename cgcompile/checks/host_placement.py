"""Decides which operations of a program run on the host, and why.  The result is an input of the partitioner.

Two kinds of operations run there without a finding.  *data-dependent*: the value, size, strides or offset of an input or output
depends on data.  A graph cannot take such values, because its kernels have fixed grids and pointers.  *moved*: the user's code
runs the operation on the CPU, as the markers `to_host` and `to_device` show.

Private interface (torch 2.11, 2.13): `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import Finding

from ..model.devices.markers import TO_DEVICE, TO_HOST

DEVICE_COPY, CPU_OPERATION = "device-copy", "cpu-operation"

FOLLOWER = "data-dependent-follower"
"""An operation next to another one that runs on the host.

What it looks for: operations without their own finding, with an input or output whose size or value depends on data.
Why: the host computes such a value, and the sizes and addresses of a graph are fixed.
Effect: the operation runs in the host region too.  This is a reason for a region, never a finding.
Fix: follow the advice of the finding next to it.
Source: `data_dependent_nodes` in checks/host_placement.py.
"""


TENSOR_ASSERTIONS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
"""Assertions about a tensor.  They run on the host if the tensor is there."""


def placements(
    graph: Graph, findings: Sequence[Finding], data_dependent: frozenset[str], moved: Mapping[str, str]
) -> dict[str, str]:
    """Maps the names of the operations on the host to rules.  Returns {} if no finding has severity host."""
    causes = {finding.node: finding.rule for finding in findings if finding.severity == "host" and finding.node}
    if not causes:
        return {}
    rules = {**dict.fromkeys(data_dependent, FOLLOWER), **moved, **causes}
    return {node.name: rules[node.name] for node in graph.nodes if node.name in rules}


def unbacked(value: Any) -> frozenset[Any]:
    """Returns the unbacked symbols in a value: sizes and numbers that depend on data."""
    symbols: set[Any] = set()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols |= free_unbacked_symbols(leaf)
    return frozenset(symbols)


def depends(node: Node) -> frozenset[Any]:
    """Returns the unbacked symbols of a node's value."""
    return unbacked(node.meta.get("val"))


def introduces_symbols(node: Node) -> bool:
    """Returns whether a node's value has unbacked symbols that none of its inputs has."""
    symbols = depends(node)
    return bool(symbols) and not symbols <= frozenset().union(*[depends(source) for source in node.all_input_nodes])


def data_dependent_nodes(graph: Graph) -> frozenset[str]:
    """Returns the names of operations with an input or output whose value or size depends on data."""
    sources = {node for node in graph.nodes if depends(node)}
    return frozenset(
        [
            node.name
            for node in graph.nodes
            if node.op == "call_function" and (node in sources or not sources.isdisjoint(node.all_input_nodes))
        ]
    )


def moved_nodes(graph: Graph, weights: frozenset[str]) -> Mapping[str, str]:
    """Maps the names of operations that the user's code runs on the CPU to rules.  `weights` are names of placeholders.  An
    operation without tensor inputs, or with weights only, runs on the host if all its users do.  Unused copies are ignored."""
    alive = _alive(graph)
    if not any(node.target is TO_HOST for node in alive):
        return {}
    places: dict[Node, str] = {}
    for node in graph.nodes:
        places[node] = _place(node, places, weights)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and places[node] == "free":
            users = [user for user in node.users if user in alive]
            places[node] = "host" if users and all(places.get(user) == "host" for user in users) else "device"
    return {
        node.name: DEVICE_COPY if node.target is TO_HOST else CPU_OPERATION
        for node in graph.nodes
        if node.op == "call_function" and places[node] == "host" and node in alive
    }


def _place(node: Node, places: Mapping[Node, str], weights: frozenset[str]) -> str:
    if node.op == "placeholder":
        return "free" if node.name in weights else "device"
    if node.op != "call_function":
        return "free"
    if node.target is TO_HOST:
        return "host"
    if node.target is TO_DEVICE:
        return "device"
    sources = [source for source in node.all_input_nodes if has_tensor(source)]
    sides = {places[source] for source in sources}
    if "host" not in sides or "device" in sides:  # a host scalar can be an operand of an operation on the device
        return "device" if "device" in sides else "free"
    return "host"


def has_tensor(node: Node) -> bool:
    """Returns whether the value of a node contains tensors."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta.get("val")))


def _alive(graph: Graph) -> frozenset[Node]:
    """Returns the nodes that an output, a mutation or an assertion needs."""
    live_nodes: set[Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output" or _acts(node)]
    while waiting:
        node = waiting.pop()
        if node not in live_nodes:
            live_nodes.add(node)
            waiting += node.all_input_nodes
    return frozenset(live_nodes)


def _acts(node: Node) -> bool:
    if node.target in TENSOR_ASSERTIONS:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
