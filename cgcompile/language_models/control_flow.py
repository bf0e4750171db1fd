"""Branches and loops in exported programs.  Eager PyTorch runs them as Python code, because torch.cond and torch.while_loop would
compile their functions at every call.

During an export, torch.cond and torch.while_loop trace their functions with Dynamo.  It finds the tensors that they read from
enclosing functions.  Functions that read only their arguments do not need this, and tracing without Dynamo takes a third of the
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Outputs: TypeAlias = Tensor | tuple[Tensor, ...]


def cond(condition: Tensor, true: Callable[..., Outputs], false: Callable[..., Outputs], operands: tuple[Tensor, ...]) -> Any:
    """Does what `torch.cond` does, for functions that read only `operands`."""
    if torch.compiler.is_dynamo_compiling():
        return torch.cond(condition, true, false, operands)
    if torch.compiler.is_compiling():
        outputs = torch.ops.higher_order.cond(condition, _with_tuple(true), _with_tuple(false), operands)
        return outputs if len(outputs) > 1 else outputs[0]
    return (true if condition else false)(*operands)


def closed_while_loop(
    condition: Callable[..., Tensor], body: Callable[..., Any], carried: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Does what `torch.while_loop` does, for functions that read only their arguments: the carried tensors, then `others`."""
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        return torch.ops.higher_order.while_loop(condition, body, carried, others)
    return while_loop(lambda *values: condition(*values, *others), lambda *values: body(*values, *others), carried)


def while_loop(condition: Callable[..., Tensor], body: Callable[..., Any], carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Does what `torch.while_loop` does, also for functions that read other tensors."""
    if torch.compiler.is_compiling():
        return torch.while_loop(condition, body, carried)
    while condition(*carried):
        carried = body(*carried)
    return carried


def _with_tuple(function: Callable[..., Outputs]) -> Callable[..., tuple[Tensor, ...]]:
    """Makes the function return a tuple, because Inductor does not lower a branch that returns a single tensor."""

    def call(*operands: Tensor) -> tuple[Tensor, ...]:
        outputs = function(*operands)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return call
