"""Branches and loops of a graph.  Without a graph they run as Python code, because torch.cond and torch.while_loop would compile
their functions at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cond(condition: Tensor, true: Callable[..., Any], false: Callable[..., Any], operands: tuple[Tensor, ...]) -> Any:
    """`torch.cond`."""
    if torch.compiler.is_compiling():
        return torch.cond(condition, true, false, operands)
    return (true if condition else false)(*operands)


def while_loop(condition: Callable[..., Tensor], body: Callable[..., Any], carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`torch.while_loop`."""
    if torch.compiler.is_compiling():
        return torch.while_loop(condition, body, carried)
    while condition(*carried):
        carried = body(*carried)
    return carried
