"""A functional program of one way, in which rows are selected, computed with, and put back, at fixed sizes: a branch can hold it.

`if mask.any(): y[mask] = f(x[mask])` needs no size that depends on data: `f` runs on as many rows as a mask can select, and those
that count go back.  Where something else follows from selected rows, the program stays as it is.

Private interfaces (torch 2.11, 2.13): `get_proxy_mode` and its `tracer`, `torch.fx.traceback.set_current_meta`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.fx.traceback import set_current_meta
from torch.utils._pytree import tree_leaves

from ...model.tracing.way import ASKED
from ..torch_program import copied_graph, with_graph
from .axes import Counts, Unsupported, depends
from .interpreter import taken_by, traced
from .results import ResultInterpreter, takes_selected

aten = torch.ops.aten

SAID = frozenset([aten._assert_scalar.default, aten.sym_constrain_range_for_size.default, aten._assert_tensor_metadata.default])
"""What asserts something of sizes and gives nothing."""

KEPT = ("stack_trace", "nn_module_stack")
"""What a node's metadata says of the user's code."""


def with_fixed_sizes(program: ExportedProgram, *, told_gpu: bool) -> ExportedProgram:
    """The program, in which no size depends on data any more; as it was where that is not possible.  `told_gpu` as for
    ResultInterpreter.  Weights are shared, not copied."""
    if not any(depends(node) for node in program.graph.nodes):
        return program
    root = copied_graph(program)
    try:
        renamed = _replace(root, told_gpu)
    except Unsupported:
        return program
    root.graph.lint()
    root.recompile()
    fixed = with_graph(program, root, renamed)
    forget_symbols(fixed)
    return fixed


def _replace(root: GraphModule, told_gpu: bool) -> dict[str, str]:
    """Changes the graph in place.  Gives the new names of values that are taken out.  Raises Unsupported."""
    graph = root.graph
    region = _found(graph)
    said = [node for node in region if node.target in SAID]
    rest = [node for node in region if node.target not in SAID and (depends(node) or _gives_tensor(node))]
    if any(depends(leaf) for leaf in tree_leaves(graph.output_node().args) if isinstance(leaf, Node)):
        raise Unsupported("a result of a size that depends on data")
    known = Counts()
    padded = _at_bounds(root, rest, told_gpu, known)
    for node in said:
        _check_said(node, known)
        graph.erase_node(node)
    for marker in graph.find_nodes(op="call_function", target=ASKED):
        marker.args = map_arg(marker.args, lambda node: padded.get(node, node))
    for node in rest:
        if not depends(node):
            node.replace_all_uses_with(padded[node])
    for node in reversed(region):
        if node.target in SAID:
            continue
        if node.users:
            raise Unsupported(f"{next(iter(node.users)).target} of selected rows")
        graph.erase_node(node)
    return {node.name: copy.name for node, copy in padded.items()}


def _found(graph: Graph) -> list[Node]:
    """The operations whose sizes depend on data, what takes one of these or its size, and conditions about sizes."""
    region: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not ASKED:
            conditions = [each for each in node.all_input_nodes if each in region and not _gives_tensor(each)]
            if depends(node) or takes_selected(node) or conditions:
                region[node] = None
    return list(region)


def _gives_tensor(node: Node) -> bool:
    """Whether a node gives a tensor: what else takes a size is a condition about it."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta.get("val")))


def _check_said(node: Node, known: Counts) -> None:
    """Raises Unsupported unless what is asserted of sizes is so whatever is selected."""
    if node.target is not aten._assert_scalar.default:
        return
    value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else node.args[0]
    if not (value is True or (isinstance(value, torch.SymBool) and (value.node.expr == True or known.holds(value.node.expr)))):  # noqa: E712
        raise Unsupported("an assertion about a size")


def _at_bounds(root: GraphModule, region: Sequence[Node], told_gpu: bool, known: Counts) -> dict[Node, Node]:
    """Adds the operations at fixed sizes, those of each of `region` in front of it.  Gives the nodes that stand for these."""
    taken = taken_by(region)
    last: dict[str, Node] = {}  # which of `region` a traced node stands for, by its name
    results: list[Node] = []

    def padded(*values: Any) -> list[torch.Tensor]:
        run = ResultInterpreter(dict(zip(taken, values, strict=True)), known, told_gpu=told_gpu)
        tracer: Any = get_proxy_mode().tracer
        for node in region:
            with set_current_meta(node):
                run.run(node)
            for operation in reversed(tracer.graph.nodes):
                if operation.name in last or operation.op == "placeholder":
                    break
                last[operation.name] = node
        results[:] = [node for node in region if isinstance(run.values[node], torch.Tensor)]
        return [run.values[node] for node in results]

    return _copied(root.graph, traced(padded, taken), taken, region, results, last)


def _copied(
    graph: Graph,
    module: GraphModule,
    taken: Sequence[Node],
    region: Sequence[Node],
    results: Sequence[Node],
    last: Mapping[str, Node],
) -> dict[Node, Node]:
    """Copies a traced graph, every operation in front of the node that it stands for."""
    copies: dict[Node, Node] = dict(zip(module.graph.find_nodes(op="placeholder"), taken, strict=True))
    ends = module.graph.output_node().args[0]
    place = region[0]
    for node in module.graph.nodes:
        if node.op == "get_attr":
            raise Unsupported("a constant")
        if node.op != "call_function":
            continue
        place = last.get(node.name, place)
        with graph.inserting_before(place):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        like = {name: place.meta[name] for name in KEPT if name in place.meta}
        copies[node].meta = {"val": node.meta.get("val"), **like}
    return {node: copies[end] for node, end in zip(results, ends, strict=True)}


def forget_symbols(program: ExportedProgram) -> None:
    """Drops the ranges of sizes that no value has any more."""
    left = set().union(*[_symbols(node.meta.get("val")) for node in program.graph.nodes])
    ranges: Mapping[Any, Any] = program.range_constraints
    for symbol in [symbol for symbol in ranges if str(symbol).startswith("u") and symbol not in left]:
        del program.range_constraints[symbol]


def _symbols(value: Any) -> set[Any]:
    symbols: set[Any] = set()
    for leaf in tree_leaves(value):
        for size in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            symbols |= size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
    return symbols
