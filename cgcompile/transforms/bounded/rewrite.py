"""Rewrites a program whose outputs have data-dependent sizes to a program of fixed sizes.

Such an output gets the largest possible size (nonzero of n elements gives at most n rows).  It is padded with zeros, and its true
size becomes one more output.  The operations that lead to it run at that size in the same graph, so the host does not have to wait.

The operations of other values do not change: a sum over selected rows runs on the host, as in a program without such outputs.

Private interface (torch 2.11, 2.13): `torch.fx.traceback.set_current_meta`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.traceback import set_current_meta

from ...export.bounded.axes import Counts, Unsupported, node_axes
from ...export.bounded.fixed_sizes import KEPT, forget_symbols, placed
from ...export.bounded.interpreter import Interpreter, chain, taken_by, traced
from ...export.torch_program import copied_graph, with_graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounded:
    """`program`: the model, which returns the true sizes (*counts*) after its results.  `axes`: (output, axis, position of its
    count) of every padded axis."""

    program: ExportedProgram
    axes: tuple[tuple[int, int, int], ...]


def with_bounds(program: ExportedProgram, *, told_gpu: bool) -> Bounded | None:
    """Returns the program with bounds, or None if no output has a data-dependent size.  Weights are shared, not copied.
    `told_gpu`: the bundle is for a GPU.

    Raises Unsupported if the program writes to a tensor, or if a size depends on an operation that may mix rows.
    """
    root = copied_graph(program)
    output = root.graph.output_node()
    results = list(output.args[0])
    outputs = [node for node in results if isinstance(node, Node) and node_axes(node)]
    if not outputs:
        return None
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        raise Unsupported("a program that writes")
    nodes = list(root.graph.nodes)
    region = chain(nodes, outputs)
    _check_writes(nodes, region)
    replaced = [node for node in dict.fromkeys(results) if isinstance(node, Node) and node in set(region)]
    padded, counts, axes, known_counts = _inserted(root, region, replaced, told_gpu=told_gpu)
    specs = list(program.graph_signature.output_specs)
    for index, node in enumerate(results):
        if node in padded:
            results[index] = padded[node]
            specs[index] = replace(specs[index], arg=TensorArgument(name=padded[node].name))
    rows = []
    for index, node in enumerate(output.args[0]):
        rows += [(index, axis, len(results) + number) for axis, number in axes.get(node, {}).items()]
    specs += [OutputSpec(kind=OutputKind.USER_OUTPUT, arg=TensorArgument(name=count.name), target=None) for count in counts]
    output.args = ((*results, *counts),)
    output.meta.pop("val", None)
    _drop(root, region, known_counts)
    root.graph.lint()
    root.recompile()
    bounded_program = with_graph(program, root, {}, output_specs=specs, other_results=True)
    forget_symbols(bounded_program)
    return Bounded(program=bounded_program, axes=tuple(rows))


def _check_writes(nodes: Sequence[Node], region: Sequence[Node]) -> None:
    """Raises Unsupported for a write between the first and the last node of `region`, because the padded operations follow the last
    one.  Also raises it for a write to a node of `region`, or to a value that depends on one."""
    between = set(nodes[nodes.index(region[0]) : nodes.index(region[-1]) + 1])
    reached = set(region)
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written = [operand for operand in node.all_input_nodes if operand is node.args[0]]
            if node in between or not reached.isdisjoint(written) or not written:
                raise Unsupported("a write in place")


def _inserted(
    root: GraphModule, region: Sequence[Node], outputs: Sequence[Node], *, told_gpu: bool
) -> tuple[dict[Node, Node], list[Node], dict[Node, dict[int, int]], Counts]:
    """Adds the padded operations after the last node of `region`.

    Returns the nodes that replace `outputs`; the nodes of the counts; for each output, its axes with the numbers of their counts;
    `Counts`."""
    inputs = taken_by(region)
    sizes = list(dict.fromkeys([expr for node in outputs for expr in node_axes(node).values()]))
    known_counts = Counts()
    numbers: dict[Any, int] = {}  # number of the count by size; several sizes can share a count

    def padded(*values: Any) -> tuple[list[Tensor], list[Tensor]]:
        interpreter = Interpreter(dict(zip(inputs, values, strict=True)), known_counts, told_gpu=told_gpu)
        for node in region:
            with set_current_meta(node), placed(node):
                interpreter.run(node)
        with set_current_meta(outputs[-1]):
            counts: list[Tensor] = []
            for expr in sizes:
                number = next((at for at, count in enumerate(counts) if count is known_counts.of(expr)), len(counts))
                counts += [known_counts.of(expr)] if number == len(counts) else []
                numbers[expr] = number
            return [interpreter.masked(node).clone() for node in outputs], [count.clone() for count in counts]

    copies, nodes = _copied(root, traced(padded, inputs), inputs, region[-1])
    axes = {node: {axis: numbers[expr] for axis, expr in node_axes(node).items()} for node in outputs}
    return dict(zip(outputs, copies, strict=True)), nodes, axes, known_counts


def _copied(root: GraphModule, module: GraphModule, inputs: Sequence[Node], last: Node) -> Any:
    """Copies a traced graph after `last`, and returns the nodes of its outputs."""
    node_map: dict[Node, Node] = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with root.graph.inserting_before(last.next):
        for node in module.graph.nodes:
            if node.op == "get_attr":
                name = f"bounded_{len(root._modules)}"
                value = getattr(module, str(node.target))
                if not isinstance(value, GraphModule):
                    raise Unsupported("a constant")
                root.add_module(name, value)
                node_map[node] = root.graph.get_attr(name)
                node_map[node].meta = {}
            elif node.op == "call_function":
                node_map[node] = root.graph.node_copy(node, node_map.__getitem__)
                node_map[node].meta = {"val": node.meta["val"], **{name: node.meta[name] for name in KEPT if name in node.meta}}
    return map_arg(module.graph.output_node().args[0], node_map.__getitem__)


def _drop(root: GraphModule, region: Sequence[Node], counts: Counts) -> None:
    """Removes the nodes of `region` that no other node needs, and the export's assertions about their sizes that always hold.

    For a size that an operator of another library returns, torch 2.11 asserts that it is 2 or more (`create_unbacked_symint`)."""
    unused = {node: None for node in region}
    others = [node for node in region if getattr(node.target, "namespace", "aten") != "aten"]
    foreign = {expr for node in others for expr in node_axes(node).values()}
    for node in root.graph.nodes:
        if node not in unused and any(source in unused for source in node.all_input_nodes) and _is_redundant(node, counts, foreign):
            unused[node] = None
    for node in reversed([node for node in root.graph.nodes if node in unused]):
        if not node.users:
            root.graph.erase_node(node)


def _is_redundant(node: Node, counts: Counts, foreign: Set[Any]) -> bool:
    """Whether a node asserts a property of a size that always holds, or computes the condition of such an assertion.  `foreign`:
    sizes of operators of other libraries, for which an assertion that they are 2 or more also counts."""
    aten = torch.ops.aten
    if node.target in (aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default, aten.sym_size.int):
        return True
    condition = node.all_input_nodes[0] if node.target is aten._assert_scalar.default else node
    value = condition.meta.get("val")
    if not isinstance(value, torch.SymBool):
        return False
    return counts.holds(value.node.expr) or any(value.node.expr == (size >= 2) for size in foreign)
