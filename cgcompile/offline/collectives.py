"""Collectives of an exported program as one operator of ours, which Inductor does not see into.

`torch.distributed`'s functional collectives are operators `_c10d_functional::...`, each followed by one that waits for it.  The
operator here stands for both; the wrapper that Inductor writes calls it by its name, and `lower/launches.py` records the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the shapes of what its operators give
from torch import Tensor

from ..targets.collectives.exchange_nodes import output_shape

NAME = "collective"
"""Of the operator: (input, one of `exchange_nodes.KINDS`, ranks, the rank that sends or -1, what comes first) -> what comes."""

_LIBRARY = torch.library.Library("cgcompile", "FRAGMENT")
_LIBRARY.define(f"{NAME}(Tensor given, str kind, int world, int sender, Tensor? after=None) -> Tensor")


def _shape(tensor: Tensor, kind: str, world: int, sender: int, after: Tensor | None = None) -> Tensor:
    return tensor.new_empty(output_shape(kind, tensor.shape, world))


torch.library.register_fake(f"cgcompile::{NAME}", _shape, lib=_LIBRARY)

COLLECTIVE = torch.ops.cgcompile.collective.default

UNSAID = 0
"""The ranks of operators that do not say how many there are: those of the build."""


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
"""What replaces functional collectives.  `checks/collectives.py` refuses all others, and those of groups beside the whole world."""
