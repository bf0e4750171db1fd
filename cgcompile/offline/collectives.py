"""Replaces the collectives of an exported program by one operator of cgcompile, which is opaque to Inductor.

A functional collective of `torch.distributed` is an operator `_c10d_functional::...`, which a wait_tensor operator follows.
`cgcompile::collective` replaces both.  Inductor's wrapper calls it by name, and `lower/launches.py` records the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the shape functions of the operators
from torch import Tensor

from ..targets.collectives.exchange_nodes import output_shape

NAME = "collective"
"""(input, one of `exchange_nodes.KINDS`, number of ranks, sender or -1, result of the previous collective) -> the received
tensor."""

_LIBRARY = torch.library.Library("cgcompile", "FRAGMENT")
_LIBRARY.define(f"{NAME}(Tensor given, str kind, int world, int sender, Tensor? after=None) -> Tensor")


def _shape(tensor: Tensor, kind: str, world: int, sender: int, after: Tensor | None = None) -> Tensor:
    return tensor.new_empty(output_shape(kind, tensor.shape, world))


torch.library.register_fake(f"cgcompile::{NAME}", _shape, lib=_LIBRARY)

COLLECTIVE = torch.ops.cgcompile.collective.default

UNSAID = 0
"""The number of ranks for operators that do not state it: all ranks of the build."""


def _all_reduce(tensor: Tensor, reduction: str, group: str) -> Tensor:
    return COLLECTIVE(tensor.contiguous(), "all_reduce", UNSAID, -1)


def _all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    return COLLECTIVE(tensor.contiguous(), "all_gather", size, -1)


def _reduce_scatter(tensor: Tensor, reduction: str, size: int, group: str) -> Tensor:
    return COLLECTIVE(tensor.contiguous(), "reduce_scatter", size, -1)


def _all_to_all(tensor: Tensor, outputs: Any, inputs: Any, group: str) -> Tensor:
    return COLLECTIVE(tensor.contiguous(), "all_to_all", len(outputs), -1)


def _broadcast(tensor: Tensor, sender: int, group: str) -> Tensor:
    return COLLECTIVE(tensor.contiguous(), "broadcast", UNSAID, sender)


_FUNCTIONAL = torch.ops._c10d_functional

COLLECTIVES: Mapping[Any, Callable[..., Any]] = {
    _FUNCTIONAL.all_reduce.default: _all_reduce,
    _FUNCTIONAL.all_gather_into_tensor.default: _all_gather,
    _FUNCTIONAL.reduce_scatter_tensor.default: _reduce_scatter,
    _FUNCTIONAL.all_to_all_single.default: _all_to_all,
    _FUNCTIONAL.broadcast.default: _broadcast,
    _FUNCTIONAL.wait_tensor.default: lambda tensor: tensor,
}
"""The replacements of functional collectives.  `checks/collectives.py` refuses all other collectives, and groups of only some
ranks."""
