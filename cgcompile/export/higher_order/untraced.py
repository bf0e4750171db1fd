"""Exports models that torch.export alone cannot trace: derivatives by autograd, products under nested vmap, module hashes, and
constant tensors in branches and loops.

torch.export traces above autograd, so it does not trace the operators that torch.autograd.grad() runs.  It fails at their results
(forces of an energy, residuals of an equation, densities).  It also fails inside torch.func.grad(), vjp(), jacrev() and others.  An
export below autograd traces each operator of the derivative.
A product under two nested torch.vmap() leaves a value of the inner vmap in the program's constants.  Only operators without users
read it.  While torch.export traces, each read of an attribute looks a module up by its hash.  A `__hash__` that reads attributes
would recurse without end.

torch.export lifts constant tensors (`torch.tensor(1.0)`) out of the top-level graph, but not out of bodies of `torch.cond` and
`torch.while_loop`, where they stay attributes.  Then torch cannot make the program functional: "Attempting to use FunctionalTensor
on its own" (2.11, 2.13).  Here they become operands of the branch or loop, and constants of the program.

Private interfaces of torch: `torch.export._trace._export(pre_dispatch=False)` and `is_functorch_wrapped_tensor`.  Tested with torch
2.13; the interfaces of 2.11 have the same parameters.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.export import ExportedProgram
from torch.export._trace import _export
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

from ..torch_program import with_graph
from .conditionals import bodies, is_conditional
from .inline import add_attribute, fake_mode

UNTRACED = "We found a fake tensor in the exported program constant's list"
"""torch.export's error (2.11, 2.13) for a value that it has not traced."""

DERIVATIVES = "/torch/_functorch/eager_transforms.py"
"""The file of torch.func.grad() and the other derivatives of torch.func (2.11, 2.13)."""

BACKWARD = "Cannot backprop through mirrored meta"
"""torch's error (2.11, 2.13) if backward() reaches a fake tensor."""


def export(module: torch.nn.Module, tensors: Sequence[torch.Tensor], dynamic: Any) -> ExportedProgram:
    """Exports `module`.  A model that computes derivatives by autograd is exported again, below autograd."""
    try:
        with _hashes_computed_before(module):
            return _lifted(_without_leaks(torch.export.export(module, tuple(tensors), dynamic_shapes=dynamic, strict=False)))
    except Exception as error:
        untraced = isinstance(error, RuntimeError) and UNTRACED in str(error)
        if not (untraced or _in_derivative(error)):
            raise
    # inputs are detached because they may belong to the autograd graph of an earlier call
    # outputs are detached because torch would also trace the derivative of outputs with a history
    fresh = tuple([tensor.detach() for tensor in tensors])
    with _outputs_without_history(module), _hashes_computed_before(module):
        return _lifted(_export(module, fresh, dynamic_shapes=dynamic, strict=False, pre_dispatch=False))


def _in_derivative(error: BaseException) -> bool:
    """Whether `error` was raised inside a derivative of torch.func."""
    return any(frame.f_code.co_filename.endswith(DERIVATIVES) for frame, _ in traceback.walk_tb(error.__traceback__))


def _without_leaks(program: ExportedProgram) -> ExportedProgram:
    """Removes, in place, unused operators that read a leaked value of torch.vmap, and replaces the value by zeros."""
    leaks = [name for name, value in program.constants.items() if torch.is_tensor(value) and is_functorch_wrapped_tensor(value)]
    graph, signature = program.graph, program.graph_signature
    for name in leaks:
        leak = next(node for node in graph.nodes if signature.inputs_to_lifted_tensor_constants.get(node.name) == name)
        readers = _readers(leak)
        for node in reversed(list(graph.nodes)):  # users come after the nodes that they read
            if node in readers and not node.users and not node.is_impure():
                graph.erase_node(node)
        if not leak.users:
            value = program.constants[name]
            program.constants[name] = torch.zeros(value.shape, dtype=value.dtype)
    return program


def _readers(node: Node) -> frozenset[Node]:
    """Returns every node that depends on `node`."""
    pending, readers = list(node.users), set(node.users)
    while pending:
        new = [user for user in pending.pop().users if user not in readers]
        pending += new
        readers |= {*new}
    return frozenset(readers)


@contextmanager
def _outputs_without_history(module: torch.nn.Module) -> Iterator[None]:
    def detach(_module: torch.nn.Module, _inputs: Any, outputs: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    handle = module.register_forward_hook(detach)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _hashes_computed_before(model: torch.nn.Module) -> Iterator[None]:
    """Caches the hashes of modules whose class defines `__hash__`, while the context is active.  The key is the id of `__dict__`,
    which torch.export's copies of a module share."""
    hashed_modules = [module for module in model.modules() if type(module).__hash__ is not object.__hash__]
    hashes = {id(vars(module)): hash(module) for module in hashed_modules}
    kinds = {kind for module in hashed_modules for kind in type(module).__mro__ if "__hash__" in vars(kind) and kind is not object}
    before: list[tuple[Any, Any]] = [(kind, vars(kind)["__hash__"]) for kind in kinds]

    def replaced(method: Any) -> Any:
        return lambda self: hashes[id(vars(self))] if id(vars(self)) in hashes else method(self)

    try:
        for kind, method in before:
            kind.__hash__ = replaced(method)
        yield
    finally:
        for kind, method in before:
            kind.__hash__ = method


# --- constant tensors in bodies ---------------------------------------------------------------------------------------


def _lifted(program: ExportedProgram) -> ExportedProgram:
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
