"""Changes the graph, the weights or the device of an exported program.  torch has no public interface for this.

Private interfaces (torch 2.11, 2.13): the constructor of `ExportedProgram`, its attributes `_guards_code` where it exists and
`_example_inputs`, `FakeTensor`, and the name of the logger of `torch._export.serde.serialize`.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, InputSpec, OutputKind, OutputSpec
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

SERIALIZER = logging.getLogger("torch._export.serde.serialize")


def copied_graph(program: ExportedProgram) -> GraphModule:
    """Copies a program's graph with the names of its nodes.  deepcopy alone renames nodes with names of Python builtins."""
    module_copy = copy.deepcopy(program.graph_module)
    for old, new in zip(program.graph.nodes, module_copy.graph.nodes, strict=True):
        new.name = old.name
    return module_copy


def with_graph(
    program: ExportedProgram,
    root: GraphModule,
    renamed: Mapping[str, str],
    input_specs: Sequence[InputSpec] | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, Any] | None = None,
    dialect: ExportedProgram | None = None,
    output_specs: Sequence[OutputSpec] | None = None,
    other_results: bool = False,
) -> ExportedProgram:
    """Returns `program` with the graph of `root`.  `renamed`: old -> new names of outputs.  Weights are shared, not copied.

    `dialect`: a program whose verifiers the new one gets (default: `program`).  The verifiers of `torch.export` allow in-place
    operators.  `other_results`: `output_specs` has results that the program did not have, and calls return a tuple of them.
    """
    signature = program.graph_signature
    result_specs = signature.output_specs if output_specs is None else output_specs
    specs = [replace(spec, arg=_renamed(spec.arg, renamed)) for spec in result_specs]
    entries = [_entry(entry, renamed) for entry in copy.deepcopy(program.module_call_graph)]
    if other_results:
        entries[:1] = [_with_results(entry, specs) for entry in entries[:1]]
    result = ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=ExportGraphSignature(
            input_specs=list(signature.input_specs if input_specs is None else input_specs),
            output_specs=specs,
        ),
        state_dict=dict(program.state_dict if state_dict is None else state_dict),
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=entries,
        example_inputs=program.example_inputs,
        constants=program.constants if constants is None else dict(constants),
        verifiers=(dialect or program).verifiers,
    )
    if hasattr(program, "_guards_code"):
        result._guards_code = program._guards_code
    return result


def device_of(program: ExportedProgram) -> torch.device:
    """Returns the device that a program was exported on: the device of its first tensor, or the CPU if it has none."""
    for node in program.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                return value.device
    return torch.device("cpu")


def on_device(program: ExportedProgram, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Returns `program` as if it had been exported on `device`.  `tensors` replace weights by name.  Other weights stay on their
    devices.

    torch's `move_to_device_pass` would move every weight, and would not change autocast regions.
    """
    root = copied_graph(program)
    for module in root.modules():
        if isinstance(module, GraphModule):
            move_graph(module, device)
    weights = {name: _like(value, tensors[name]) if name in tensors else value for name, value in program.state_dict.items()}
    constants = {name: tensors.get(name, value) for name, value in program.constants.items()}
    return with_graph(program, root, {}, state_dict=weights, constants=constants)


def serializable(program: ExportedProgram) -> ExportedProgram:
    """Returns `program`, or its functional form if it has no outputs, since `torch.export.save` fails without outputs (2.11 and
    2.13).  In the functional form mutated tensors are outputs."""
    return program if program.graph_signature.output_specs else program.run_decompositions({})


def without_weights(program: ExportedProgram) -> ExportedProgram:
    """Returns `program` on the CPU without weight values and example inputs.  Every weight is one zero, expanded to its shape.
    Drops range constraints of expressions such as `2*s0`: a program loaded with one cannot be decomposed."""
    program = serializable(program)
    named = {**program.state_dict, **program.constants}
    hollow = {name: _hollow(value) for name, value in named.items() if isinstance(value, torch.Tensor)}
    bare_program = on_device(program, torch.device("cpu"), hollow)
    bare_program._example_inputs = None
    for size in [size for size in bare_program.range_constraints if not size.is_Symbol]:
        del bare_program.range_constraints[size]
    return bare_program


def save_program(program: ExportedProgram, target: Path | BinaryIO) -> None:
    """Calls `torch.export.save` without its warnings.  torch warns about the unknown type of an operator's empty list
    (`torch.while_loop` without further operands), which does no harm."""
    before, SERIALIZER.disabled = SERIALIZER.disabled, True
    try:
        torch.export.save(program, target)
    finally:
        SERIALIZER.disabled = before


def with_weights(program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Returns a program from `without_weights` with weights again.  `tensors`: parameters, buffers and constants, by name."""
    state = {name: _like(value, tensors[name]) for name, value in program.state_dict.items()}
    return with_graph(
        program, program.graph_module, {}, state_dict=state,
        constants={name: tensors.get(name, value) for name, value in program.constants.items()},
    )  # fmt: skip


def _hollow(value: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=value.dtype)
    return zero.expand(value.shape) if value.numel() else torch.empty(value.shape, dtype=value.dtype)


def move_graph(module: GraphModule, device: torch.device) -> None:
    """Changes the device in a graph's operator arguments, autocast regions, and fake tensors of node metadata."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = moved_arguments(node, device)
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(torch.Tensor, lambda value: _fake_at(value, device), node.meta["val"])
    module.recompile()


def moved_arguments(node: Node, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a node with every device replaced by `device`, except the meta device."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type != "meta" else value

    args, kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
    if getattr(node.target, "__name__", "") in AUTOCAST:
        args = (device.type, args[1] or torch.get_autocast_dtype(str(args[0])), *args[2:])
    return args, kwargs


AUTOCAST = ("wrap_with_autocast", "_enter_autocast")
"""Operators that begin an autocast region; their arguments are (device type, dtype, ...)."""


def _fake_at(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a fake tensor like `value` on `device`; values on the meta device stay there."""
    if not isinstance(value, FakeTensor) or value.device in (device, torch.device("meta")):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`, as a torch.nn.Parameter if `value` is one."""
    return torch.nn.Parameter(tensor.detach(), value.requires_grad) if isinstance(value, torch.nn.Parameter) else tensor


def _entry(entry: ModuleCallEntry, renamed: Mapping[str, str]) -> ModuleCallEntry:
    if entry.signature is None:
        return entry
    outputs = [_renamed(argument, renamed) for argument in entry.signature.outputs]
    return replace(entry, signature=replace(entry.signature, outputs=outputs))


def _with_results(entry: ModuleCallEntry, specs: Sequence[OutputSpec]) -> ModuleCallEntry:
    """Returns the entry of the top-level module with the results of `specs`: calls return a tuple of them."""
    results = [spec.arg for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    if entry.signature is None:
        return entry
    flat = tree_structure(tuple([0] * len(results)))
    return replace(entry, signature=replace(entry.signature, outputs=results, out_spec=flat))


def _renamed(argument: Any, renamed: Mapping[str, str]) -> Any:
    name: str = getattr(argument, "name", "")
    return replace(argument, name=renamed[name]) if name in renamed else argument


def arguments(node: Node) -> dict[str, Any]:
    """Returns the arguments of an operator's call by name, including defaults."""
    assert isinstance(node.target, torch._ops.OpOverload), node.target
    schema = node.target._schema.arguments
    values = {argument.name: argument.default_value for argument in schema}
    values |= {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    return values | node.kwargs


def spell_counts(graph: Graph) -> None:
    """Replaces `sym_numel` by products of `sym_size`.  torch.compile of 2.11 accepts no other operator that returns a number."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_numel.default):
        (tensor,) = node.args
        value = tensor.meta["val"]
        with graph.inserting_before(node):
            total: Any = 1
            for axis, size in enumerate(value.shape):
                factor: Any = size
                if isinstance(size, torch.SymInt):
                    factor = graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))
                    factor.meta = {**node.meta, "val": size}
                if isinstance(total, int) and isinstance(factor, int):
                    total *= factor
                elif isinstance(total, int) and total == 1:
                    total = factor
                else:
                    product = graph.call_function(operator.mul, (total, factor))
                    product.meta = {**node.meta, "val": _value_of(total) * _value_of(factor)}
                    total = product
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _value_of(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument
