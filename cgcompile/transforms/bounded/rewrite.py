"""A program whose outputs have sizes that depend on data, as one of fixed sizes.

Such an output gets the size that holds whatever is selected (nonzero of n elements gives n rows at the most).  It is filled up with
zeros, and its true size is one more output.  What leads to it is computed at that size, in the same graph: no host has to wait.

Other values keep their operations: a sum over selected rows runs on the host, as it does where no output needs this.

Private interfaces (torch 2.11, 2.13): `torch._dispatch.python.enable_python_dispatcher`,
`torch.fx.traceback.set_current_meta` and `preserve_node_meta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta, set_current_meta
from torch.utils._pytree import tree_structure

from ...export.bounded.axes import Counts, Unsupported, depends, node_axes
from ...export.bounded.fixed_sizes import forget_symbols
from ...export.bounded.interpreter import Interpreter, chain
from ...export.torch_program import copied_graph, spell_counts, with_graph
from ...model.user_code import place

KEPT = ("stack_trace", "nn_module_stack")
"""What a node's metadata says of the user's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounded:
    """`program` has counts behind the results of the model.  `axes`: (output, axis, position of its count) of every axis that is
    padded."""

    program: ExportedProgram
    axes: tuple[tuple[int, int, int], ...]


def with_bounds(program: ExportedProgram) -> Bounded | None:
    """None where no output of the program has a size that depends on data.  Weights are shared, not copied.

    Raises Unsupported where one follows from an operation that is not known to keep rows apart.
    """
    root = copied_graph(program)
    output = root.graph.output_node()
    results = list(output.args[0])
    wanted = [node for node in results if isinstance(node, Node) and node_axes(node)]
    if not wanted:
        return None
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        raise Unsupported("a program that writes")
    nodes = list(root.graph.nodes)
    found = chain(nodes, wanted)
    _check_writes(nodes, found)
    replaced = [node for node in dict.fromkeys(results) if isinstance(node, Node) and node in set(found)]
    made, counts, axes, known = _inserted(root, found, replaced)
    specs = list(program.graph_signature.output_specs)
    for index, node in enumerate(results):
        if node in made:
            results[index] = made[node]
            specs[index] = replace(specs[index], arg=TensorArgument(name=made[node].name))
    rows = []
    for index, node in enumerate(output.args[0]):
        rows += [(index, axis, len(results) + number) for axis, number in axes.get(node, {}).items()]
    specs += [OutputSpec(kind=OutputKind.USER_OUTPUT, arg=TensorArgument(name=count.name), target=None) for count in counts]
    output.args = ((*results, *counts),)
    output.meta.pop("val", None)
    _drop(root, found, known)
    root.graph.lint()
    root.recompile()
    made_program = with_graph(program, root, {}, output_specs=specs)
    _give_outputs(made_program, specs)
    forget_symbols(made_program)
    return Bounded(program=made_program, axes=tuple(rows))


def _check_writes(nodes: Sequence[Node], found: Sequence[Node]) -> None:
    """Raises Unsupported where something is written between the first and the last of these nodes, as they move behind all of it,
    and where one of them, or what follows from it, is written to."""
    between = set(nodes[nodes.index(found[0]) : nodes.index(found[-1]) + 1])
    reached = set(found)
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written = [each for each in node.all_input_nodes if each is node.args[0]]
            if node in between or not reached.isdisjoint(written) or not written:
                raise Unsupported("a write in place")


def _inserted(
    root: GraphModule, found: Sequence[Node], wanted: Sequence[Node]
) -> tuple[dict[Node, Node], list[Node], dict[Node, dict[int, int]], Counts]:
    """Adds the padded operations behind the last of `found`.  Gives, for each of `wanted`, the node that is in its place; the nodes
    of the counts; for each the number of the count of its padded axes; and what is known of these."""
    own = set(found)
    taken = list(dict.fromkeys([source for node in found for source in node.all_input_nodes if source not in own]))
    if any("val" not in node.meta for node in taken) or any(map(depends, taken)):
        raise Unsupported("a graph inside of another")
    sizes = list(dict.fromkeys([expr for node in wanted for expr in node_axes(node).values()]))
    known = Counts()
    numbers: dict[Any, int] = {}  # of the counts, by size: one count may be that of several

    def padded(*values: Any) -> tuple[list[Tensor], list[Tensor]]:
        run = Interpreter(dict(zip(taken, values, strict=True)), known)
        for node in found:
            with set_current_meta(node), _placed(node):
                run.run(node)
        with set_current_meta(wanted[-1]):
            counts: list[Tensor] = []
            for expr in sizes:
                number = next((at for at, each in enumerate(counts) if each is known.of(expr)), len(counts))
                counts += [known.of(expr)] if number == len(counts) else []
                numbers[expr] = number
            return [run.masked(node).clone() for node in wanted], [count.clone() for count in counts]

    mode = next(value.fake_mode for node in taken for value in [node.meta["val"]] if hasattr(value, "fake_mode"))
    with mode, enable_python_dispatcher(), torch.no_grad(), preserve_node_meta():
        try:
            traced = make_fx(padded)(*[node.meta["val"] for node in taken])
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise Unsupported("PyTorch cannot compute it at the bound") from error
    traced.graph.eliminate_dead_code()
    spell_counts(traced.graph)
    made, nodes = _copied(root, traced, taken, found[-1])
    axes = {node: {axis: numbers[expr] for axis, expr in node_axes(node).items()} for node in wanted}
    return dict(zip(wanted, made, strict=True)), nodes, axes, known


@contextmanager
def _placed(node: Node) -> Iterator[None]:
    """Names the user's line in what is raised about a node."""
    try:
        yield
    except Unsupported as error:
        where, _ = place(node)
        raise Unsupported(f"{error} ({where})" if where else str(error)) from error


def _copied(root: GraphModule, traced: GraphModule, taken: Sequence[Node], last: Node) -> Any:
    """Copies a traced graph behind `last`; gives the nodes of its outputs."""
    known: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), taken, strict=True))
    with root.graph.inserting_before(last.next):
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                name = f"bounded_{len(root._modules)}"
                value = getattr(traced, str(node.target))
                if not isinstance(value, GraphModule):
                    raise Unsupported("a constant")
                root.add_module(name, value)
                known[node] = root.graph.get_attr(name)
                known[node].meta = {}
            elif node.op == "call_function":
                known[node] = root.graph.node_copy(node, known.__getitem__)
                known[node].meta = {"val": node.meta["val"], **{name: node.meta[name] for name in KEPT if name in node.meta}}
    return map_arg(traced.graph.output_node().args[0], known.__getitem__)


def _drop(root: GraphModule, found: Sequence[Node], counts: Counts) -> None:
    """Takes out those of the nodes that nothing else needs, with what the export asserts of their sizes that is always so.

    Of a size that an operator of another library gives, torch 2.11 asserts that it is 2 or more (`create_unbacked_symint`), at the
    operator's own line."""
    own = {node: None for node in found}
    selecting: dict[Any, str] = {}
    for node in found:
        for expr in node_axes(node).values():
            selecting.setdefault(expr, node.meta.get("stack_trace", ""))
    for node in root.graph.nodes:
        if node in own or not any(source in own for source in node.all_input_nodes):
            continue
        if _says_nothing(node, counts) or (_asserts(node) and node.meta.get("stack_trace") in _lines_of(node, selecting)):
            own[node] = None
    for node in reversed([node for node in root.graph.nodes if node in own]):
        if not node.users:
            root.graph.erase_node(node)


def _asserts(node: Node) -> bool:
    """Whether a node is a condition about a size, or asserts one."""
    return node.target is torch.ops.aten._assert_scalar.default or isinstance(node.meta.get("val"), torch.SymBool)


def _lines_of(node: Node, selecting: Mapping[Any, str]) -> list[str]:
    """Where the sizes of a condition come from."""
    condition = node.all_input_nodes[0] if node.target is torch.ops.aten._assert_scalar.default else node
    symbols = condition.meta["val"].node.expr.free_symbols if isinstance(condition.meta.get("val"), torch.SymBool) else set()
    return [selecting[symbol] for symbol in symbols if selecting.get(symbol)]


def _says_nothing(node: Node, counts: Counts) -> bool:
    """Whether a node asserts of a size what is so whatever is selected, or leads to such an assertion."""
    aten = torch.ops.aten
    if node.target in (aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default, aten.sym_size.int):
        return True
    condition = node.all_input_nodes[0] if node.target is aten._assert_scalar.default else node
    value = condition.meta.get("val")
    return isinstance(value, torch.SymBool) and counts.holds(value.node.expr)


def _give_outputs(program: ExportedProgram, specs: Sequence[OutputSpec]) -> None:
    """The outputs that calls of the program's module give: a tuple of all."""
    (first, *_) = program.module_call_graph
    assert first.signature is not None
    first.signature.outputs = [spec.arg for spec in specs]
    first.signature.out_spec = tree_structure(tuple([0] * len(specs)))
