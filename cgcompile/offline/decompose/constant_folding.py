"""Constant folding: computes values that depend only on weights, such as the scale of a batch normalization, at build time.  It
also folds double-precision tables that depend on nothing.  It does not fold views of weights, or large copies in a wider dtype,
which every call would read from memory.  Private interfaces (torch 2.11, 2.13): `torch._ops.OpOverload` and its `_schema`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from ...targets.weights import contents, stored_dtype
from ..collectives import COLLECTIVE
from ..lowered import WEIGHT, FoldedConstant
from .retrace import Retraced

aten = torch.ops.aten

VIEWS = frozenset({
    aten.view.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor, aten.select.int, aten.alias.default,
    aten.detach.default, aten.as_strided.default, aten._unsafe_view.default, aten.reshape.default, aten.split.Tensor,
})  # fmt: skip
"""Operations whose result is a view of their input."""

SMALL = 64 << 10
"""A result of at most this many bytes is always folded."""

GROWTH = 1.25
"""The maximum size of other folded results, relative to the weights that they are computed from."""


TABLE = 64 << 20
"""The maximum bytes of a folded double-precision table."""


def fold(
    retraced: Retraced, values: Mapping[str, torch.Tensor], live: Collection[str] = ()
) -> tuple[Retraced, tuple[FoldedConstant, ...]]:
    """Folds constants; changes the graph of `retraced` in place.  Returns it with the constants as new weights, and the constants.
    `values`: the program's tensors by name, on the CPU.  Folds nothing that depends on weights in `live` or on those that the
    program changes."""
    graph = retraced.graph.graph
    named = _weights(retraced, live)
    weights = {node: values[name].detach() for node, name in named.items()}
    for node in _derived(graph, weights):
        if _multiplies_by_one(node):  # instead of folding it: a copy of a weight, such as a bias, could not be updated
            node.replace_all_uses_with(node.args[0])
    derived = _derived(graph, weights)
    constants: dict[str, FoldedConstant] = {}
    tensors, names = list(retraced.tensors), list(retraced.names)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    # computes all constants before it replaces any, because one may depend on another
    nodes = list(_read_nodes(graph, derived, weights))
    computed = [(node, _computed(node, weights), {named[weight] for weight in _from_weights(node, weights)}) for node in nodes]
    for node, tensor, sources in computed:
        if tensor is None:
            continue
        constant = _constant(tensor, sources)
        if (same := constants.get(constant.name)) is not None:
            constant = _constant(tensor, sources.union(same.sources))
        constants[constant.name] = constant
        with graph.inserting_after(last[0]):
            placeholder = graph.placeholder(f"folded_{len(names)}")
        placeholder.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placeholder)
        last[0] = placeholder
        tensors.append(node.meta["val"])
        names.append((WEIGHT, constant.name))
    graph.eliminate_dead_code()
    retraced.graph.recompile()
    return replace(retraced, tensors=tuple(tensors), names=tuple(names)), tuple(constants.values())


def _weights(retraced: Retraced, live: Collection[str]) -> dict[Node, str]:
    """The placeholders of weights that nothing writes to, with their names."""
    placeholders = [node for node in retraced.graph.graph.nodes if node.op == "placeholder"]
    weights = {}
    for index, (node, (kind, name)) in enumerate(zip(placeholders, retraced.names, strict=True)):
        if kind == WEIGHT and index not in retraced.written and name not in live:
            weights[node] = name
    return weights


def _derived(graph: torch.fx.Graph, known: Mapping[Node, torch.Tensor]) -> set[Node]:
    """The nodes that compute one tensor only from weights, from other such nodes, or from nothing (a range, a constant)."""
    derived: set[Node] = set()
    written = _overwritten_nodes(graph)
    for node in graph.nodes:
        computes = node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and _is_pure(node)
        if computes and node not in written and all(operand in known or operand in derived for operand in node.all_input_nodes):
            derived.add(node)
    return derived


def _overwritten_nodes(graph: torch.fx.Graph) -> set[Node]:
    """Nodes whose memory a later operation writes to.  torch decomposes circular padding like this."""
    written: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = zip(node.target._schema.arguments, node.args, strict=False)
        changed = [value for parameter, value in arguments if parameter.alias_info is not None and parameter.alias_info.is_write]
        for value in [argument for argument in changed if isinstance(argument, Node)]:
            base = value
            written.add(base)
            while base.op == "call_function" and _is_view(base):
                base = base.all_input_nodes[0]
                written.add(base)
    return written


def _is_view(node: Node) -> bool:
    returned = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return bool(node.all_input_nodes) and any(argument.alias_info is not None for argument in returned)


def _is_pure(node: Node) -> bool:
    if node.target is COLLECTIVE:
        return False  # the result is another rank's data
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable and not node.is_impure()


def _multiplies_by_one(node: Node) -> bool:
    """Whether a node multiplies a tensor by 1 and keeps its dtype and layout."""
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar) or not isinstance(node.args[0], Node):
        return False
    operand, product = node.args[0].meta.get("val"), node.meta["val"]
    number = not isinstance(node.args[1], bool | Node) and node.args[1] == 1
    return number and isinstance(operand, torch.Tensor) and (operand.dtype, operand.shape, operand.stride()) == (
        product.dtype, product.shape, product.stride(),
    )  # fmt: skip


def _read_nodes(graph: torch.fx.Graph, derived: set[Node], known: Mapping[Node, torch.Tensor]) -> Iterator[Node]:
    """Yields the derived nodes that the rest of the graph reads, in order.  For a view, yields the node that it is a view of."""
    read_nodes: dict[Node, None] = {}
    for node in graph.nodes:
        if node in derived or node in known:
            continue
        for operand in node.all_input_nodes:
            base = operand
            while base in derived and base.target in VIEWS and base.all_input_nodes:
                base = base.all_input_nodes[0]
            if base in derived and (_from_weights(base, known) or _is_table(base)):
                read_nodes[base] = None
    yield from read_nodes


def _is_table(node: Node) -> bool:
    """Whether a node depends on double-precision values, as the factors of Fourier transforms do."""
    waiting, seen = [node], {node}
    while waiting:
        ancestor = waiting.pop()
        if isinstance(ancestor.meta.get("val"), torch.Tensor) and ancestor.meta["val"].dtype == torch.float64:
            return True
        waiting += [source for source in ancestor.all_input_nodes if source not in seen]
        seen.update(ancestor.all_input_nodes)
    return False


def _from_weights(node: Node, known: Mapping[Node, torch.Tensor]) -> set[Node]:
    """The weights that a node depends on."""
    weights: set[Node] = set()
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        ancestor = waiting.pop()
        if ancestor in known:
            weights.add(ancestor)
        elif ancestor not in seen:
            seen.add(ancestor)
            waiting += ancestor.all_input_nodes
    return weights


def _computed(node: Node, known: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a node with its strides in the graph, or None if it is too large or not dense."""
    fake = node.meta["val"]
    size = fake.numel() * fake.element_size()
    weights = [known[weight] for weight in _from_weights(node, known)]
    limit = max(SMALL, GROWTH * sum(value.numel() * value.element_size() for value in weights)) if weights else TABLE
    if size > limit or not _is_dense(fake):
        return None
    with torch.no_grad():
        value = _run(node, dict(known))
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(value)


def _run(node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
    if node not in values:
        for operand in node.all_input_nodes:
            _run(operand, values)
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda source: values[source])
        cpu = torch.device("cpu")
        args, kwargs = torch.fx.node.map_aggregate(arguments, lambda leaf: cpu if isinstance(leaf, torch.device) else leaf)
        values[node] = node.target(*args, **kwargs)
    return values[node]


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: (axis[1], axis[0])):
        if size != 1 and stride != expected:
            return False
        expected *= size if size != 1 else 1
    return math.prod(tensor.shape) > 0


def _constant(value: torch.Tensor, sources: Collection[str]) -> FoldedConstant:
    dtype, shape, strides, data = stored_dtype(value), tuple(value.shape), value.stride(), contents(value, value.stride())
    name = hashlib.sha256(repr((dtype, shape, strides)).encode() + data).hexdigest()[:16]
    return FoldedConstant(name=f"cgcompile.folded.{name}", contents=data, sources=tuple(sorted(sources)))
