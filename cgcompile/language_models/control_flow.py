"""Branches and loops in exported programs.  Eager PyTorch runs them as Python code, because torch.cond and torch.while_loop would
compile their functions at every call.

During an export, torch.cond and torch.while_loop trace their functions with Dynamo, which finds the tensors that they read from
enclosing functions.  Here these tensors are passed as arguments, because an export with Dynamo takes about twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

Outputs: TypeAlias = Tensor | tuple[Tensor, ...]


def cond(condition: Tensor, true: Callable[..., Outputs], false: Callable[..., Outputs], operands: tuple[Tensor, ...]) -> Any:
    """Does what `torch.cond` does, for functions that read only `operands`."""
    if torch.compiler.is_dynamo_compiling():
        return torch.cond(condition, true, false, operands)
    if torch.compiler.is_compiling():
        outputs = torch.ops.higher_order.cond(condition, _with_tuple(true), _with_tuple(false), operands)
        return outputs if len(outputs) > 1 else outputs[0]
    return (true if condition else false)(*operands)


def while_loop(
    condition: Callable[..., Tensor],
    body: Callable[..., Any],
    carried: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    model: nn.Module | None = None,
    reads: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, ...]:
    """Does what `torch.while_loop` does.  `condition` and `body` get the carried tensors, then `others`.

    The body may also read the parameters and buffers `reads` of `model`, by name.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.while_loop(lambda *values: condition(*values, *others), lambda *values: body(*values, *others), carried)
    if torch.compiler.is_compiling():
        count = len(carried) + len(others)

        def unfinished(*values: Tensor) -> Tensor:
            return condition(*values[:count])

        def step(*values: Tensor) -> Any:
            if model is None:
                return body(*values)
            tensors = {f"model.{name}": tensor for name, tensor in zip(reads, values[count:], strict=True)}
            return functional_call(_Body(model, body), tensors, values[:count])

        return torch.ops.higher_order.while_loop(unfinished, step, carried, (*others, *reads.values()))
    while condition(*carried, *others):
        carried = body(*carried, *others)
    return carried


class _Body(nn.Module):
    """A function as a module, so that `functional_call` can replace the tensors of the model that the function reads."""

    def __init__(self, model: nn.Module, body: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.body = model, body

    def forward(self, *values: Tensor) -> Any:
        return self.body(*values)


def _with_tuple(function: Callable[..., Outputs]) -> Callable[..., tuple[Tensor, ...]]:
    """Makes the function return a tuple, because Inductor does not lower a branch that returns a single tensor."""

    def call(*operands: Tensor) -> tuple[Tensor, ...]:
        outputs = function(*operands)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return call
