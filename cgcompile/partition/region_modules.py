"""Builds one module per region for an int_key.  Its sizes are constants, and its weights are attributes under their names.

Private interfaces (torch 2.11, 2.13): `FakeTensorMode`, for the shapes in the nodes' metadata.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from ..export.higher_order.conditionals import WHILE, bodies, is_conditional
from ..export.higher_order.conditionals import higher_order as higher_order_name
from ..export.torch_program import device_of, move_graph, moved_arguments
from ..export.weights import weight_placeholders
from ..model.devices.markers import marker
from ..model.source import CPU
from .node_kinds import TENSOR_CHECKS, NodeKind, NodeKinds, higher_order, node_kinds, unbacked
from .split import Partition, PlannedRegion, value_of
from .symbolic_sizes import Bindings, bindings, number
from .writes import WriteConstraints, write_constraints

KEPT = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "custom")
"""Metadata about the origin of a node.  The other metadata uses export's symbols and is dropped."""

DIRECT = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Higher-order operators whose arguments after their modules become the inputs of these modules."""

OPERANDS = 3
"""The index of the argument of `cond` and of `while_loop` that is passed to their bodies, after the values that a loop carries."""


def region_modules(program: ExportedProgram, partition: Partition, tensors: Sequence[torch.Tensor]) -> tuple[GraphModule, ...]:
    """Returns one module per region of `partition`, for the int_key whose inputs have the sizes of `tensors`; their values are not
    read.  A host region is on the CPU, with CPU copies of its weights.  A graph region is on the program's device.

    `module(*inputs) -> tuple`, in the order of the region's `inputs` and `module_outputs`.  Weights are attributes under their
    names in the program and share the program's tensors.  `meta["val"]` of a node of known size is a fake tensor of its shape,
    strides and dtype at this int_key.  A region clones an input before it writes to it, but a graph writes in place to the inputs
    in its `written`.  Raises inputs-unlike.
    """
    known = node_kinds(program)
    sizes = bindings(program, tensors)
    writes = write_constraints(program.graph_module, known)
    names = {node.name: node for node in program.graph.nodes}
    return tuple([_ModuleBuilder(program, known, sizes, writes, names).module(region) for region in partition.regions])


class _ModuleBuilder:
    def __init__(
        self, program: ExportedProgram, known: NodeKinds, sizes: Bindings, writes: WriteConstraints, names: dict[str, Node]
    ) -> None:
        self.program = program
        self.known = known
        self.sizes = sizes
        self.writes = writes
        self.names = names
        self.weights = weight_placeholders(program)
        self.state: dict[str, Any] = {**program.constants, **program.state_dict}
        self.device = device_of(program)
        self.host = False
        self.mode = FakeTensorMode()
        self.graph = Graph()
        self.stand_ins: dict[Node, Any] = {}
        self.held: dict[str, Any] = {}

    def module(self, region: PlannedRegion) -> GraphModule:
        self.host = region.kind == "host" and self.device != CPU
        nodes = [self.names[name] for name in region.nodes]
        for name in region.inputs:
            source = self.names[name]
            self.stand_ins[source] = self._described(self.graph.placeholder(name), source)
        for name in region.inputs:
            source = self.names[name]
            in_place = region.kind == "graph" and name in region.written
            if not in_place and any(source in self.writes.written.get(node, ()) for node in nodes):
                copied = self.graph.call_function(torch.ops.aten.clone.default, (self.stand_ins[source],))
                self.stand_ins[source] = self._described(copied, source)
        for node in nodes:
            self.stand_ins[node] = self._value(node.args[0]) if marker(node) else self._call(node)
        written = region.written if region.kind == "host" else ()
        self.graph.output(tuple([self._value(self.names[name]) for name in (*region.outputs, *written)]))
        graph_module = GraphModule(self.held, self.graph, class_name=region.name.title().replace("-", ""))
        graph_module.graph.lint()
        return graph_module

    def _call(self, node: Node) -> Node:
        if higher_order(node):
            return self._call_higher_order(node)
        arguments = moved_arguments(node, CPU) if self.host else (node.args, node.kwargs)
        args, kwargs = torch.fx.map_arg(arguments, self._value)
        return self._described(self.graph.create_node(node.op, node.target, args, kwargs, name=node.name), node)

    def _value(self, node: Any) -> Any:
        """Returns the node or number that represents a node of the program in this region."""
        node = value_of(node)
        if node not in self.stand_ins:
            if self.known[node] is NodeKind.NUMBER:
                return number_of(node, self.sizes)
            self.stand_ins[node] = self._weight(node)
        return self.stand_ins[node]

    def _weight(self, node: Node) -> Node:
        target = self.weights[node.name]
        self.held[target] = self.state[target].to(CPU) if self.host else self.state[target]
        return self._described(self.graph.get_attr(target), node)

    def _call_higher_order(self, node: Node) -> Node:
        """Copies the call.  Its number operands become constants in its modules, because torch cannot export the operator with
        Python numbers."""
        modules = {
            source: specialized(getattr(self.program.graph_module, str(source.target)), self.sizes)
            for source in node.all_input_nodes
            if self.known[source] is NodeKind.SUBMODULE
        }
        if self.host:
            for part in [part for module in modules.values() for part in module.modules() if isinstance(part, GraphModule)]:
                move_graph(part, CPU)
        args = list(moved_arguments(node, CPU)[0] if self.host else node.args)
        if node.target.name() in DIRECT or is_conditional(node):
            start = (
                OPERANDS if is_conditional(node) else 1 + max(index for index, argument in enumerate(args) if argument in modules)
            )
            operands = list(args[start] if is_conditional(node) else args[start:])
            constant = [
                index
                for index, operand in enumerate(operands)
                if not isinstance(operand, Node) or self.known[operand] is NodeKind.NUMBER
            ]
            values = {index: torch.fx.map_arg(operands[index], self._value) for index in constant}
            for module in modules.values():
                _fill(module, {index + _carried(node): value for index, value in values.items()})
            node_operands = [operand for index, operand in enumerate(operands) if index not in values]
            args[start:] = [tuple(node_operands)] if is_conditional(node) else node_operands
        for module in modules.values():
            _without_constants(module)
        for index, (source, module) in enumerate(modules.items()):
            target = f"{node.name}_part_{index}"
            self.held[target] = module
            self.stand_ins[source] = self.graph.get_attr(target)
        mapped = torch.fx.map_arg((tuple(args), node.kwargs), self._value)
        return self._described(self.graph.create_node(node.op, node.target, *mapped, name=node.name), node)

    def _described(self, new_node: Node, source: Node) -> Node:
        new_node.meta = {name: source.meta[name] for name in KEPT if name in source.meta}
        value = source.meta.get("val")
        if value is not None and not unbacked(value):
            new_node.meta["val"] = tree_map(self._fake, value)
        return new_node

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return number(value, self.sizes)
        shape = [number(size, self.sizes) for size in value.shape]
        strides = [number(stride, self.sizes) for stride in value.stride()]
        with self.mode:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=CPU if self.host else value.device)


def number_of(node: Node, sizes: Bindings) -> Any:
    """Returns the value of a node that the sizes of the call determine.  Raises inputs-unlike."""
    if node.op == "placeholder":
        return None if node.meta.get("val") is None else number(node.meta["val"], sizes)
    value = node.meta["val"]
    if isinstance(value, torch.SymInt) or not isinstance(value, torch.SymFloat | torch.SymBool):
        return number(value, sizes)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: number_of(operand, sizes))
    return node.target(*args, **kwargs)


def specialized(module: GraphModule, sizes: Bindings) -> GraphModule:
    """Copies a higher-order operator's module.  Sizes become constants; markers and TENSOR_CHECKS are removed."""
    copied = copy.deepcopy(module)
    for node in list(copied.graph.nodes):
        value = node.meta.get("val")
        known = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and not unbacked(value)
        if node.op == "get_attr" and isinstance(getattr(copied, str(node.target)), GraphModule):
            setattr(copied, str(node.target), specialized(getattr(copied, str(node.target)), sizes))
        elif node.target in TENSOR_CHECKS:
            copied.graph.erase_node(node)
            continue
        elif known:
            _replace(node, number_of(node, sizes))
        elif marker(node):
            _replace(node, node.args[0])
        node.meta = {name: node.meta[name] for name in KEPT if name in node.meta}
        if node.op == "call_function" and (known or marker(node)):
            copied.graph.erase_node(node)
    copied.recompile()
    return copied


def _fill(module: GraphModule, values: Mapping[int, Any]) -> None:
    """Replaces inputs of `module` by values: `values` maps positions of inputs to values."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for index, value in values.items():
        _replace(placeholders[index], value)
        module.graph.erase_node(placeholders[index])
    module.recompile()


def _carried(node: Node) -> int:
    """The number of values that a loop carries; 0 for other operators."""
    return len(node.args[2]) if higher_order_name(node) == WHILE else 0


def _without_constants(module: GraphModule) -> None:
    """Moves the number operands of branches and loops in a module into their bodies."""
    for node in [node for node in module.graph.nodes if is_conditional(node)]:
        operands = list(node.args[OPERANDS])
        constants = {index + _carried(node): operand for index, operand in enumerate(operands) if not isinstance(operand, Node)}
        for body in bodies(node, module):
            _fill(body, constants)
            _without_constants(body)
        node.update_arg(OPERANDS, tuple([operand for operand in operands if isinstance(operand, Node)]))
    module.recompile()


def _replace(node: Node, value: Any) -> None:
    """Replaces `node` by `value`, a node or a Python number, in all its users."""
    for user in list(node.users):
        user.args = torch.fx.map_arg(user.args, lambda argument: value if argument is node else argument)
        user.kwargs = torch.fx.map_arg(user.kwargs, lambda operand: value if operand is node else operand)
