"""Branches and loops of a graph.  Without a graph they run as Python code, because torch.cond and torch.while_loop would compile
their functions at every call.

During an export, torch.cond and torch.while_loop trace their functions with Dynamo, which finds the tensors that they read from
enclosing functions.  Functions that read only their arguments do not need it.  Without Dynamo, tracing takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Outputs: TypeAlias = Tensor | tuple[Tensor, ...]


def cond(condition: Tensor, true: Callable[..., Outputs], false: Callable[..., Outputs], operands: tuple[Tensor, ...]) -> Any:
    """`torch.cond` of functions that read only `operands`, and return a tensor or several."""
    if torch.compiler.is_dynamo_compiling():
        return torch.cond(condition, true, false, operands)
    if torch.compiler.is_compiling():
        outputs = torch.ops.higher_order.cond(condition, _with_tuple(true), _with_tuple(false), operands)
        return outputs if len(outputs) > 1 else outputs[0]
    return (true if condition else false)(*operands)


def closed_while_loop(
    condition: Callable[..., Tensor], body: Callable[..., Any], carried: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """`torch.while_loop` of functions that read only their arguments: the carried tensors, then `others`."""
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        return torch.ops.higher_order.while_loop(condition, body, carried, others)
    return while_loop(lambda *values: condition(*values, *others), lambda *values: body(*values, *others), carried)


def while_loop(condition: Callable[..., Tensor], body: Callable[..., Any], carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`torch.while_loop`."""
    if torch.compiler.is_compiling():
        return torch.while_loop(condition, body, carried)
    while condition(*carried):
        carried = body(*carried)
    return carried


def _with_tuple(function: Callable[..., Outputs]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns the function with a tuple as its result: Inductor does not lower a branch that returns a tensor alone."""

    def call(*operands: Tensor) -> tuple[Tensor, ...]:
        outputs = function(*operands)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return call
