"""A program without the marker operators: for targets where nothing is cut.

Private interfaces (torch 2.11, 2.13): the constructor of `ExportedProgram`, and its attribute `_guards_code` where it exists.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node

from .roles import marker


def without_markers(program: ExportedProgram) -> ExportedProgram:
    """`program` without the marker operators, which are identities; itself when it has none.  All other nodes keep their names and
    metadata; weights are shared, not copied.  Needs nothing of cgcompile to be saved or loaded."""
    if not any(marker(node) for module in _modules(program.graph_module) for node in module.graph.nodes):
        return program
    made = copy.deepcopy(program.graph_module)
    renamed = _drop(made)
    for module in _modules(made):
        if module is not made:
            _drop(module)
    result = ExportedProgram(
        root=made,
        graph=made.graph,
        graph_signature=_signature(program.graph_signature, renamed),
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=[_entry(entry, renamed) for entry in copy.deepcopy(program.module_call_graph)],
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
    if hasattr(program, "_guards_code"):
        result._guards_code = program._guards_code
    return result


def _modules(module: GraphModule) -> list[GraphModule]:
    return [each for each in module.modules() if isinstance(each, GraphModule)]


def _drop(module: GraphModule) -> dict[str, str]:
    """Takes the markers out of `module`'s graph; gives name of a marker -> name of what it is given."""
    renamed: dict[str, str] = {}
    for node in [node for node in module.graph.nodes if marker(node)]:
        source = node.args[0]
        assert isinstance(source, Node)
        renamed[node.name] = renamed.get(source.name, source.name)
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    module.recompile()
    return renamed


def _signature(signature: ExportGraphSignature, renamed: Mapping[str, str]) -> ExportGraphSignature:
    return ExportGraphSignature(
        input_specs=list(signature.input_specs),
        output_specs=[replace(spec, arg=_argument(spec.arg, renamed)) for spec in signature.output_specs],
    )


def _entry(entry: ModuleCallEntry, renamed: Mapping[str, str]) -> ModuleCallEntry:
    if entry.signature is None:
        return entry
    outputs = [_argument(argument, renamed) for argument in entry.signature.outputs]
    return replace(entry, signature=replace(entry.signature, outputs=outputs))


def _argument(argument: Any, renamed: Mapping[str, str]) -> Any:
    name: str = getattr(argument, "name", "")
    return replace(argument, name=renamed[name]) if name in renamed else argument
