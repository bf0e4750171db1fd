"""An exported program with another graph, which torch has no public way to make; the arguments of its operators.

Private interfaces (torch 2.11, 2.13): the constructor of `ExportedProgram`, and its attribute `_guards_code` where it exists.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, InputSpec
from torch.fx import GraphModule, Node


def copied_graph(program: ExportedProgram) -> GraphModule:
    """A copy of a program's graph whose nodes keep their names: a plain copy renames those called as Python's own functions are."""
    made = copy.deepcopy(program.graph_module)
    for old, new in zip(program.graph.nodes, made.graph.nodes, strict=True):
        new.name = old.name
    return made


def with_graph(
    program: ExportedProgram,
    root: GraphModule,
    renamed: Mapping[str, str],
    input_specs: Sequence[InputSpec] | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """`program` with the graph of `root`, whose outputs have new names where `renamed` says so.  Weights are shared, not copied."""
    signature = program.graph_signature
    result = ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=ExportGraphSignature(
            input_specs=list(signature.input_specs if input_specs is None else input_specs),
            output_specs=[replace(spec, arg=_renamed(spec.arg, renamed)) for spec in signature.output_specs],
        ),
        state_dict=dict(program.state_dict if state_dict is None else state_dict),
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=[_entry(entry, renamed) for entry in copy.deepcopy(program.module_call_graph)],
        example_inputs=program.example_inputs,
        constants=program.constants if constants is None else dict(constants),
        verifiers=program.verifiers,
    )
    if hasattr(program, "_guards_code"):
        result._guards_code = program._guards_code
    return result


def _entry(entry: ModuleCallEntry, renamed: Mapping[str, str]) -> ModuleCallEntry:
    if entry.signature is None:
        return entry
    outputs = [_renamed(argument, renamed) for argument in entry.signature.outputs]
    return replace(entry, signature=replace(entry.signature, outputs=outputs))


def _renamed(argument: Any, renamed: Mapping[str, str]) -> Any:
    name: str = getattr(argument, "name", "")
    return replace(argument, name=renamed[name]) if name in renamed else argument


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator's call by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload), node.target
    schema = node.target._schema.arguments
    values = {argument.name: argument.default_value for argument in schema}
    values |= {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    return values | node.kwargs
