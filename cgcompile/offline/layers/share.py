"""Cuts out one device's share of a program: its operations, and an *exchange* (a broadcast) of values that another device needs.

For any assignment, all devices have the same exchanges in the same order.  Each takes the previous one's result as an argument, and
the last one computes an output, so that no compiler drops or moves an exchange.

Private interfaces (torch 2.11, 2.13): the expression of a SymInt (`size.node.expr`), the `fake_mode` of a node's value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...errors import BuildError
from ...export.torch_program import copied_graph, with_graph
from ...export.weights import WEIGHT_KINDS
from ...model.user_code import place
from ..collectives import COLLECTIVE
from .assign import Assignment

aten = torch.ops.aten


def share_of(program: ExportedProgram, assignment: Assignment, rank: int, world: int) -> ExportedProgram:
    """Returns the part of a functional program that device `rank` of `world` computes.  It has all outputs.  Each buffer that calls
    change belongs to one device.  Any other weight belongs to all devices that read it.  Raises split-refused."""
    root = copied_graph(program)
    share = _Share(root.graph, program, assignment, rank, world)
    outputs = share.cut()
    share.drop_unused()
    remaining = {node.name for node in root.graph.nodes if node.op == "placeholder"}
    inputs = [spec for spec in program.graph_signature.input_specs if spec.arg.name in remaining]
    used_weights = {str(spec.target) for spec in inputs if spec.kind in WEIGHT_KINDS}
    root.recompile()
    return with_graph(
        program, root, {}, input_specs=inputs, output_specs=outputs,
        state_dict={name: value for name, value in program.state_dict.items() if name in used_weights},
        constants={
            name: value for name, value in program.constants.items() if name in used_weights or not isinstance(value, torch.Tensor)
        },
    )  # fmt: skip


class _Share:
    def __init__(self, graph: Graph, program: ExportedProgram, assignment: Assignment, rank: int, world: int) -> None:
        self._graph, self._program, self._rank, self._world = graph, program, rank, world
        self._ranks = {node: assignment.ranks[node.name] for node in graph.nodes if node.name in assignment.ranks}
        self._nodes = {node.name: node for node in graph.nodes}
        self._last: Node | None = None
        """The previous exchange."""
        self._sizes: dict[Any, Node] = {}

    def cut(self) -> list[OutputSpec]:
        """Inserts the exchanges.  Returns the output specs: the new contents of the device's buffers, and all other outputs."""
        nodes = list(self._graph.nodes)
        output, signature = nodes[-1], self._program.graph_signature
        owners = {spec.target: self._ranks.get(self._nodes[spec.arg.name]) for spec in signature.input_specs}
        changed: dict[Node, list[int]] = {}  # value -> the devices that have a buffer with this value as new contents
        for spec in signature.output_specs:
            if spec.kind == OutputKind.BUFFER_MUTATION:
                changed.setdefault(self._nodes[spec.arg.name], []).append(owners[spec.target] or 0)
        self._bind_sizes(nodes)
        first = next(node for node in nodes if node.op != "placeholder")
        moved: dict[Node, Node] = {}  # value of another device -> the received value
        for node in nodes:
            owner = self._ranks.get(node)
            if owner is None:
                self._replace_size(node)
                continue
            if node.target is aten.as_strided.default:
                text = "as_strided depends on a value's memory layout, which a broadcast does not preserve"
                raise BuildError("split-refused", f"{place(node)[0] or 'model'}: {text}")
            users = [user for user in node.users if user in self._ranks and self._ranks[user] != owner]
            if not users and all(rank == owner for rank in changed.get(node, ())):
                continue
            sent = self._exchange(node, owner, first if node.op == "placeholder" else node.next)
            if owner != self._rank:
                for user in users:
                    if self._ranks[user] == self._rank:
                        user.replace_input_with(node, sent)
                moved[node] = sent
        exchanged: dict[Node, Node] = {}
        values, specs = [], []
        for value, spec in zip(output.args[0], signature.output_specs, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                if (owners[spec.target] or 0) != self._rank:
                    continue
                value = moved.get(value, value)
            elif isinstance(value, Node) and value in self._ranks:
                value = exchanged[value] = exchanged.get(value) or self._exchange(value, self._ranks[value], output)
            values.append(value)
            named = isinstance(value, Node) and isinstance(spec.arg, TensorArgument)
            specs.append(replace(spec, arg=TensorArgument(name=value.name)) if named else spec)
        if self._last is not None and not exchanged:
            raise BuildError("split-refused", "model: no output of a call comes from a layer")
        output.args = (tuple(values),)
        return specs

    def drop_unused(self) -> None:
        """Removes nodes that this device does not need.  The device's buffers and the inputs of the call stay."""
        specs = {spec.arg.name: spec for spec in self._program.graph_signature.input_specs}
        for node in reversed(list(self._graph.nodes)):
            if node.users or node.op == "output":
                continue
            owner = self._ranks.get(node, self._rank)
            if node.op == "placeholder":
                spec = specs[node.name]
                if spec.kind == InputKind.USER_INPUT or (node in self._ranks and owner == self._rank):
                    continue
            elif node.is_impure() and owner == self._rank:
                continue
            self._graph.erase_node(node)

    def _exchange(self, node: Node, owner: int, before: Node) -> Node:
        """Adds a broadcast of a value from the device `owner`.  Returns the received value, which all devices have."""
        value = node.meta["val"]
        with self._graph.inserting_before(before):
            if owner == self._rank:
                operand = (
                    node
                    if value.is_contiguous()
                    else self._call(aten.clone.default, (node,), memory_format=torch.contiguous_format)
                )
            else:
                shape = [self._size(size, node) for size in value.shape]
                operand = self._call(aten.empty.memory_format, (shape,), dtype=value.dtype, device=value.device, pin_memory=False)
            sent = self._call(COLLECTIVE, (operand, "broadcast", self._world, owner, self._last))
        with value.fake_mode:
            like = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        for new_node in (operand, sent):
            new_node.meta.setdefault("val", like)
            new_node.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
        self._last = sent
        return sent

    def _call(self, target: Any, arguments: tuple[Any, ...], **kwargs: Any) -> Node:
        return self._graph.call_function(target, arguments, kwargs)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _bind_sizes(self, nodes: Sequence[Node]) -> None:
        """Adds a node for every symbolic size that an input has."""
        names = set(self._program.graph_signature.user_inputs)
        first = next(node for node in nodes if node.op != "placeholder")
        for node in nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or node.name not in names or not isinstance(value, torch.Tensor):
                continue
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in self._sizes:
                    with self._graph.inserting_before(first):
                        size_node = self._call(aten.sym_size.int, (node, axis))
                    size_node.meta["val"] = size
                    self._sizes[size.node.expr] = size_node

    def _replace_size(self, node: Node) -> None:
        """Computes the size of another device's value from the sizes of the inputs."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and any(operand in self._ranks for operand in node.all_input_nodes):
            with self._graph.inserting_before(node):
                size = self._size(value, node)
            for user in list(node.users):
                user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda argument: size if argument is node else argument)

    def _size(self, size: Any, node: Node) -> Any:
        """Returns a number, or a node that computes a size.  Raises split-refused if it depends on data."""
        return size if isinstance(size, int) else self._computed(size.node.expr, node, size)

    def _computed(self, expr: Any, node: Node, size: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr in self._sizes:
            return self._sizes[expr]
        function = OPERATIONS.get(type(expr).__name__)
        if function is None or not expr.args:
            cause = f"the size {size}, which another device needs, cannot be computed from the inputs' sizes"
            text = f"{place(node)[0] or 'model'}: {node.target}: {cause}"
            raise BuildError("split-refused", text, "cut where sizes are those of the inputs: `--world` with model(rank, world)")

        def combined(left: Any, right: Any) -> Node:
            size_node = self._call(function, (left, right))
            size_node.meta["val"] = function(*[term.meta["val"] if isinstance(term, Node) else term for term in (left, right)])
            return size_node

        self._sizes[expr] = reduce(combined, [self._computed(argument, node, size) for argument in expr.args])
        return self._sizes[expr]


OPERATIONS = {
    "Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Pow": operator.pow,
}  # fmt: skip
"""The functions that compute a size, by the class of the expression (sympy's, and torch's for integers)."""
