"""A program traced once more by torch, which writes down the casts of autocast, which the dispatcher makes, and takes out the batch
axes of vmap; composite operators stay whole."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..torch_program import with_graph


def traced_again(program: ExportedProgram) -> ExportedProgram:
    """`program` without autocast and vmap, its writes still operations of its graph."""
    return in_place(_without_dead(program.run_decompositions({})), program)


def _without_dead(program: ExportedProgram) -> ExportedProgram:
    """`program`, changed in place, without what nothing needs but torch's own assertions about it: how a block mask came to be."""
    check = torch.ops.aten._assert_tensor_metadata.default
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and all(user.target is check for user in node.users) and not node.is_impure():
            for user in list(node.users):
                program.graph.erase_node(user)
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def in_place(functional: ExportedProgram, program: ExportedProgram) -> ExportedProgram:
    """The functional form of `program` with its writes as operations again, as torch.export leaves them and what follows wants."""
    root, signature = functional.graph_module, functional.graph_signature
    output = root.graph.output_node()
    inputs = {spec.target: spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.BUFFER}
    places = {node.name: node for node in root.graph.find_nodes(op="placeholder")}
    kept, specs = [], []
    for value, spec in zip(output.args[0], signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            kept.append(value)
            specs.append(spec)
            continue
        assert spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION), spec
        written = places[inputs.get(spec.target, spec.target)]
        with root.graph.inserting_before(output):
            copied = root.graph.call_function(torch.ops.aten.copy_.default, (written, value))
        copied.meta = {name: value.meta[name] for name in ("stack_trace", "nn_module_stack") if name in value.meta}
        copied.meta["val"] = written.meta["val"]
    output.args = (tuple(kept),)
    root.graph.lint()
    root.recompile()
    return with_graph(functional, root, {}, dialect=program, output_specs=specs)
