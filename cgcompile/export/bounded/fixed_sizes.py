"""Rewrites the functional program of one path to fixed sizes, so that it can become a branch of `torch.cond`.

`if mask.any(): y[mask] = f(x[mask])` needs no size that depends on data.  `f` runs on as many rows as the mask has, and only the
selected rows are written back.  Results of selected rows are padded with zeros, and their true sizes become further results.  A
program with unsupported operations on selected rows stays unchanged.

Private interfaces (torch 2.11, 2.13): `get_proxy_mode` and its `tracer`, `torch.fx.traceback.set_current_meta`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.fx.traceback import set_current_meta
from torch.utils._pytree import tree_leaves

from ...model.tracing.way import ASKED
from ...model.user_code import place
from ..torch_program import copied_graph, with_graph
from .axes import Counts, Unsupported, depends, node_axes
from .interpreter import taken_by, traced
from .known_sizes import alike, holds, lowest
from .results import ResultInterpreter, takes_selected

aten = torch.ops.aten

SAID = frozenset([aten._assert_scalar.default, aten.sym_constrain_range_for_size.default, aten._assert_tensor_metadata.default])
"""Operators that assert properties of sizes and return nothing."""

KEPT = ("stack_trace", "nn_module_stack")
"""Keys of node metadata that refer to the user's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSizes:
    """`program` has no size that depends on data, unless `unsupported` names an unsupported operation.

    `assumes`: an assertion about sizes was removed, because the answers of the path imply it.  `counts`: (number of a result,
    padded axis).  For each, the program returns the true size (int64 scalar) after the model's results.
    """

    program: ExportedProgram
    counts: tuple[tuple[int, int], ...] = ()
    assumes: bool = False
    unsupported: str = ""


def with_fixed_sizes(program: ExportedProgram, answers: Sequence[bool], *, told_gpu: bool) -> FixedSizes:
    """Returns the program at fixed sizes that are large enough for any selection, or unchanged if that is not possible.
    `answers`: the answers to the path's questions.  `told_gpu`: the bundle is for a GPU.  Weights are shared, not copied."""
    if not any(depends(node) for node in program.graph.nodes):
        return FixedSizes(program=program)
    root = copied_graph(program)
    specs = list(program.graph_signature.output_specs)
    try:
        renamed, counts, assumes = _replace(root, specs, answers, told_gpu)
    except Unsupported as error:
        return FixedSizes(program=program, unsupported=str(error))
    for node in root.graph.output_node().args[0][len(specs) :]:
        specs.append(OutputSpec(kind=OutputKind.USER_OUTPUT, arg=TensorArgument(name=node.name), target=None))
    root.graph.lint()
    root.recompile()
    fixed = with_graph(program, root, renamed, output_specs=specs, other_results=bool(counts))
    forget_symbols(fixed)
    return FixedSizes(program=fixed, counts=counts, assumes=assumes)


def _replace(
    root: GraphModule, specs: Sequence[OutputSpec], answers: Sequence[bool], told_gpu: bool
) -> tuple[dict[str, str], tuple[tuple[int, int], ...], bool]:
    """Rewrites the graph in place.  Returns old -> new names of the replaced values, the padded axes as (result, axis), and whether
    it dropped an assertion that the answers imply.  Raises Unsupported."""
    graph = root.graph
    region = _dynamic_nodes(graph)
    assertions = [node for node in region if node.target in SAID]
    operations = [node for node in region if node.target not in SAID and (depends(node) or _gives_tensor(node))]
    outputs = [(value, spec.kind) for value, spec in zip(graph.output_node().args[0], specs, strict=True)]
    if any(kind is not OutputKind.USER_OUTPUT and isinstance(value, Node) and depends(value) for value, kind in outputs):
        raise Unsupported("a buffer or input that the model writes to has a size that depends on data")
    results = [value for value, kind in outputs if kind is OutputKind.USER_OUTPUT]
    axes = [(at, axis, expr) for at, value in enumerate(results) for axis, expr in node_axes(value).items()]
    true_sizes, low = Counts(), lowest(graph, answers)
    padded, filled, counts = _at_bounds(
        root, operations, list(dict.fromkeys([results[at] for at, _, _ in axes])), told_gpu, true_sizes, low
    )
    assumes, low = False, true_sizes.lowest(low)
    custom_operators = [node for node in region if getattr(node.target, "namespace", "aten") != "aten"]
    foreign = {expr for node in custom_operators for expr in node_axes(node).values()}
    for node in assertions:
        with placed(node):
            assumes |= _assumes(node, true_sizes, low, foreign)
        graph.erase_node(node)
    for marker in graph.find_nodes(op="call_function", target=ASKED):
        marker.args = map_arg(marker.args, lambda node: padded.get(node, node))
    for node in operations:
        if not depends(node) and node in padded:
            node.replace_all_uses_with(padded[node])
    output = graph.output_node()
    output.args = ((*[filled.get(value, value) for value in output.args[0]], *[counts[expr] for _, _, expr in axes]),)
    output.meta.pop("val", None)
    for node in reversed(region):
        if node.target in SAID:
            continue
        if node.users:
            raise Unsupported(f"{next(iter(node.users)).target} of selected rows")
        graph.erase_node(node)
    renamed = {node.name: copy.name for node, copy in padded.items()} | {node.name: copy.name for node, copy in filled.items()}
    return renamed, tuple([(at, axis) for at, axis, _ in axes]), assumes


def _dynamic_nodes(graph: Graph) -> list[Node]:
    """Returns the operations whose sizes depend on data, operations that use their results or sizes, and conditions about sizes."""
    region: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not ASKED:
            conditions = [operand for operand in node.all_input_nodes if operand in region and not _gives_tensor(operand)]
            part = node.target is operator.getitem and node.args[0] in region
            if depends(node) or takes_selected(node) or conditions or part:
                region[node] = None
    return list(region)


def _gives_tensor(node: Node) -> bool:
    """Whether a node returns a tensor.  Other nodes that take a size are conditions about it."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta.get("val")))


def _assumes(node: Node, true_sizes: Counts, low: Mapping[Any, int], foreign: Set[Any]) -> bool:
    """Whether an assertion about sizes is true only on this path, where sizes are at least `low`; False if it is true for every
    selection.  `foreign`: sizes from custom operators, for which torch 2.11 asserts size >= 2; these assertions are ignored.

    Raises Unsupported if the assertion may be false."""
    if node.target is not aten._assert_scalar.default:
        return False
    value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else node.args[0]
    condition = value.node.expr if isinstance(value, torch.SymBool) else value
    if condition == True or any(condition == (size >= 2) for size in foreign):  # noqa: E712  sympy's True is another object
        return False
    if condition is False or not (true_sizes.holds(condition) or holds(condition, low)):
        raise Unsupported(f"the assertion {condition} of sizes")
    return not true_sizes.holds(condition)


def _at_bounds(
    root: GraphModule, region: Sequence[Node], outputs: Sequence[Node], told_gpu: bool, true_sizes: Counts, low: Mapping[Any, int]
) -> tuple[dict[Node, Node], dict[Node, Node], dict[Any, Node]]:
    """Adds, in front of each node of `region`, its operations at fixed sizes.  `low`: smallest values of sizes.

    Returns {node of `region`: its padded node}, {node of `outputs`: its node padded with zeros}, {size: its count}."""
    inputs = taken_by(region)
    last: dict[str, Node] = {}  # name of a traced node -> the node of `region` that it belongs to
    results: list[Node] = []
    same = alike(root.graph)
    sizes = list(dict.fromkeys([expr for node in outputs for expr in node_axes(node).values()]))

    def padded(*values: Any) -> list[torch.Tensor]:
        run = ResultInterpreter(dict(zip(inputs, values, strict=True)), true_sizes, told_gpu=told_gpu, same=same, low=low)
        tracer: Any = get_proxy_mode().tracer
        for node in region:
            with set_current_meta(node), placed(node):
                run.run(node)
            for operation in reversed(tracer.graph.nodes):
                if operation.name in last or operation.op == "placeholder":
                    break
                last[operation.name] = node
        results[:] = [node for node in region if isinstance(run.values[node], torch.Tensor)]
        filled = [run.masked(node).clone() for node in outputs]
        return [*[run.values[node] for node in results], *filled, *[true_sizes.of(expr) for expr in sizes]]

    copies = _copied(root, traced(padded, inputs), inputs, region, last)
    count = len(results)
    return (
        dict(zip(results, copies[:count], strict=True)),
        dict(zip(outputs, copies[count : count + len(outputs)], strict=True)),
        dict(zip(sizes, copies[count + len(outputs) :], strict=True)),
    )


def _copied(
    root: GraphModule,
    module: GraphModule,
    inputs: Sequence[Node],
    region: Sequence[Node],
    last: Mapping[str, Node],
) -> list[Node]:
    """Copies the operations of a traced graph, each in front of its node of `region`.  Returns the copies of the outputs."""
    earliest = _earliest_axes(root.graph, region)
    copies: dict[Node, Node] = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    outputs = module.graph.output_node().args[0]
    place = region[0]
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if not isinstance(value, GraphModule):
                raise Unsupported("a constant")
            name = f"bounded_{len(root._modules)}"
            root.add_module(name, value)
            with root.graph.inserting_before(place):
                copies[node] = root.graph.get_attr(name)
            copies[node].meta = {}
        if node.op != "call_function":
            continue
        place = last.get(node.name, place)
        with root.graph.inserting_before(place):
            axis = earliest.get(_size_of_input(node))
            if axis is None:
                copies[node] = root.graph.node_copy(node, copies.__getitem__)
            else:  # the trace may read the size of an input that comes after `place`
                copies[node] = root.graph.call_function(aten.sym_size.int, axis)
        metadata = {name: place.meta[name] for name in KEPT if name in place.meta}
        copies[node].meta = {"val": node.meta.get("val"), **metadata}
    return [copies[output] for output in outputs]


def _earliest_axes(graph: Graph, region: Sequence[Node]) -> dict[Any, tuple[Node, int]]:
    """Returns the first axis with this size for each size that varies, without the tensors of `region`, which are removed."""
    removed = set(region)
    axes: dict[Any, tuple[Node, int]] = {}
    for node in graph.nodes:
        value = node.meta.get("val") if node not in removed else None
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                axes.setdefault(size.node.expr, (node, axis))
    return axes


def _size_of_input(node: Node) -> Any:
    """Returns the expression of a size that the node reads from an input of the traced graph, or None."""
    value = node.meta.get("val")
    reads = node.target is aten.sym_size.int and isinstance(node.args[0], Node) and node.args[0].op == "placeholder"
    return value.node.expr if reads and isinstance(value, torch.SymInt) else None


@contextmanager
def placed(node: Node) -> Iterator[None]:
    """Adds the model's line of a node to the text of an Unsupported error."""
    try:
        yield
    except Unsupported as error:
        where, _ = place(node)
        raise Unsupported(f"{error} ({where})" if where else str(error)) from error


def forget_symbols(program: ExportedProgram) -> None:
    """Removes range constraints of data-dependent sizes that the program no longer uses."""
    used = set().union(*[_symbols(node.meta.get("val")) for node in program.graph.nodes])
    ranges: Mapping[Any, Any] = program.range_constraints
    for symbol in [symbol for symbol in ranges if str(symbol).startswith("u") and symbol not in used]:
        del program.range_constraints[symbol]


def _symbols(value: Any) -> set[Any]:
    symbols: set[Any] = set()
    for leaf in tree_leaves(value):
        for size in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            symbols |= size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
    return symbols
