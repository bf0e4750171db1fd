"""Traces a program again, which makes the casts of autocast explicit and removes vmap.  Composite operators are not decomposed."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..torch_program import with_graph


def traced_again(program: ExportedProgram) -> ExportedProgram:
    """Returns `program` without autocast and vmap.  Writes stay in-place operations of the graph."""
    return in_place(_without_dead(program.run_decompositions({})), program)


def _without_dead(program: ExportedProgram) -> ExportedProgram:
    """Removes, in place, operations that only torch's metadata assertions use, such as those that computed a block mask."""
    check = torch.ops.aten._assert_tensor_metadata.default
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and all(user.target is check for user in node.users) and not node.is_impure():
            for user in list(node.users):
                program.graph.erase_node(user)
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def in_place(functional: ExportedProgram, program: ExportedProgram) -> ExportedProgram:
    """Returns the functional form of `program` with its writes as `copy_` operations instead of outputs, as later steps expect."""
    root, signature = functional.graph_module, functional.graph_signature
    output = root.graph.output_node()
    inputs = {spec.target: spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.BUFFER}
    places = {node.name: node for node in root.graph.find_nodes(op="placeholder")}
    results, specs = [], []
    for value, spec in zip(output.args[0], signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
            specs.append(spec)
            continue
        assert spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION), spec
        written = places[inputs.get(spec.target, spec.target)]
        with root.graph.inserting_before(output):
            copied = root.graph.call_function(torch.ops.aten.copy_.default, (written, value))
        copied.meta = {name: value.meta[name] for name in ("stack_trace", "nn_module_stack") if name in value.meta}
        copied.meta["val"] = written.meta["val"]
    output.args = (tuple(results),)
    root.graph.lint()
    root.recompile()
    return with_graph(functional, root, {}, dialect=program, output_specs=specs)
