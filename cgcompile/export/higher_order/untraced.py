"""Exports models that torch.export alone cannot trace: derivatives by autograd, products under nested vmap, and module hashes.

torch.export traces above autograd, so it does not trace the operators that torch.autograd.grad() runs.  It fails at their results
(forces of an energy, residuals of an equation, densities).  It also fails inside torch.func.grad(), vjp(), jacrev() and others.  An
export below autograd traces each operator of the derivative.
A product under two nested torch.vmap() leaves a value of the inner vmap in the program's constants.  Only operators without users
read it.  While torch.export traces, each read of an attribute looks a module up by its hash.  A `__hash__` that reads attributes
would recurse without end.

Private interfaces of torch: `torch.export._trace._export(pre_dispatch=False)` and `is_functorch_wrapped_tensor`.  Run with
torch 2.13; those of 2.11 have the same parameters.
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
from torch.utils._pytree import tree_map_only

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
            return _without_leaks(torch.export.export(module, tuple(tensors), dynamic_shapes=dynamic, strict=False))
    except Exception as error:
        untraced = isinstance(error, RuntimeError) and UNTRACED in str(error)
        if not (untraced or _in_derivative(error)):
            raise
    # inputs are detached because they may belong to the autograd graph of an earlier call
    # outputs are detached because torch would also trace the derivative of outputs with a history
    fresh = tuple([tensor.detach() for tensor in tensors])
    with _outputs_without_history(module), _hashes_computed_before(module):
        return _export(module, fresh, dynamic_shapes=dynamic, strict=False, pre_dispatch=False)


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


def _readers(node: torch.fx.Node) -> frozenset[torch.fx.Node]:
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
