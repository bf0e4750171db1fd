"""Lifts constant tensors out of bodies of `torch.cond` and `torch.while_loop`, such as `torch.tensor(1.0)` in a body.

torch.export lifts such tensors out of the top-level graph, but not out of bodies, where they stay attributes.  Then torch cannot
make the program functional: "Attempting to use FunctionalTensor on its own" (2.11, 2.13).  Here they become operands of the branch
or loop, and constants of the program, as torch.export does at the top level.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node

from ..torch_program import with_graph
from .conditionals import bodies, is_conditional
from .inline import add_attribute, fake_mode


def lifted(program: ExportedProgram) -> ExportedProgram:
    """Returns the program without tensors in bodies, or `program` itself if it has none.  Changes its graph in place."""
    root = program.graph_module
    if not _lift(root):
        return program
    signature, constants = program.graph_signature, dict(program.constants)
    specs = list(signature.input_specs)
    users = [spec for spec in specs if spec.kind is InputKind.USER_INPUT]
    first_user = specs.index(users[0]) if users else len(specs)
    inputs = [node for node in root.graph.nodes if node.op == "placeholder"]
    before = inputs[first_user] if first_user < len(inputs) else next(node for node in root.graph.nodes if node not in inputs)
    for node in _tensors(root):
        name = str(node.target)
        placeholder = _placeholder(root.graph, f"c_{name}", before, node)
        constants[name] = getattr(root, name)
        specs.insert(first_user, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=placeholder.name), name))
        first_user += 1
        node.replace_all_uses_with(placeholder)
        root.graph.erase_node(node)
        delattr(root, name)
    root.recompile()
    return with_graph(program, root, {}, input_specs=specs, constants=constants)


def _lift(module: GraphModule) -> bool:
    """Moves the tensors of bodies in `module` to `module`, which passes them as operands.  Returns whether there were any."""
    changed = False
    for node in [node for node in module.graph.nodes if is_conditional(node)]:
        for body in bodies(node, module):
            _lift(body)
            tensor_nodes = _tensors(body)
            changed |= bool(tensor_nodes)
            for inner in tensor_nodes:
                _add_operand(module, node, body, inner)
    if changed:
        module.recompile()
    return changed


def _add_operand(module: GraphModule, node: Node, body: GraphModule, inner: Node) -> None:
    """Turns an attribute tensor of `body`, which its node `inner` reads, into an operand of `node` and an input of its bodies."""
    value = getattr(body, str(inner.target))
    with module.graph.inserting_before(node):
        outer = module.graph.get_attr(add_attribute(module, "body_constant", value))
    outer.meta = dict(inner.meta)
    mode = fake_mode(node)
    if mode is not None:
        outer.meta["val"] = mode.from_tensor(value, static_shapes=True)
    operands: Any = node.args[-1]
    node.args = (*node.args[:-1], (*operands, outer))
    for other in bodies(node, module):
        first = next(node for node in other.graph.nodes if node.op != "placeholder")
        placeholder = _placeholder(other.graph, outer.name, first, outer)
        if other is body:
            inner.replace_all_uses_with(placeholder)
            other.graph.erase_node(inner)
            delattr(body, str(inner.target))
        other.recompile()


def _placeholder(graph: Graph, name: str, before: Node, like: Node) -> Node:
    """Adds an input to a graph, in front of the node `before`, with the metadata of `like`."""
    with graph.inserting_before(before):
        placeholder = graph.placeholder(name)
    placeholder.target = placeholder.name  # the generated code uses the target as argument name, which must be unique
    placeholder.meta = dict(like.meta)
    return placeholder


def _tensors(module: GraphModule) -> list[Node]:
    """Returns one node for each tensor attribute that the graph reads, and merges duplicate nodes."""
    first: dict[str, Node] = {}
    for node in list(module.graph.nodes):
        name = str(node.target)
        if node.op != "get_attr" or not isinstance(getattr(module, name, None), torch.Tensor):
            continue
        if first.setdefault(name, node) is not node:
            node.replace_all_uses_with(first[name])
            module.graph.erase_node(node)
    return list(first.values())
