"""Which operations follow an obstacle to the host.

Two things make an operation follow.  *loose*: its value, or one that it takes, depends on data by itself (a number that the host
read) or in its size, its strides or its offset (an unbacked symbol of export): such values never cross to a graph, whose kernels
have fixed grids and pointers.  *moved*: the user's code computes on the CPU, between the markers of placing.py.

Private name of torch, 2.11 and 2.13: `torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..model.device_tracking import TO_DEVICE, TO_HOST

DEVICE_COPY, CPU_OPERATION = "device-copy", "cpu-operation"


def unbacked(value: Any) -> frozenset[Any]:
    """The symbols of sizes and numbers in a value that only data decides."""
    symbols: set[Any] = set()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols |= free_unbacked_symbols(leaf)
    return frozenset(symbols)


def depends(node: Node) -> frozenset[Any]:
    """The unbacked symbols of a node's value."""
    return unbacked(node.meta.get("val"))


def born(node: Node) -> bool:
    """Whether a node's value depends on data in a way that none of its inputs does."""
    made = depends(node)
    return bool(made) and not made <= frozenset().union(*[depends(source) for source in node.all_input_nodes])


def loose(graph: Graph) -> frozenset[str]:
    """The operations whose value, or one that they take, depends on data in its size or by itself."""
    hanging = {node for node in graph.nodes if depends(node)}
    return frozenset(
        [
            node.name
            for node in graph.nodes
            if node.op == "call_function" and (node in hanging or any(source in hanging for source in node.all_input_nodes))
        ]
    )


def moved(graph: Graph, weights: frozenset[str]) -> Mapping[str, str]:
    """The operations that the user's code runs on the CPU: node name -> rule.  `weights` names the placeholders of parameters,
    buffers and constants, which are wherever they are used.

    What takes only weights, or no tensor at all (a factory), goes to the host when all that use it are there.  A copy that nothing
    uses is no copy.
    """
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
    sources = [source for source in node.all_input_nodes if _has_tensor(source)]
    found = {places[source] for source in sources}
    if "host" not in found or "device" in found:  # a scalar of the host may be combined with tensors of the device
        return "device" if "device" in found else "free"
    return "host"


def _has_tensor(node: Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta.get("val")))


def _alive(graph: Graph) -> frozenset[Node]:
    """What the outputs need, and what writes."""
    found: set[Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output" or _writes(node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return frozenset(found)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
