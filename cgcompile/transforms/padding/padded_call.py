"""A call of one operator at two sizes of a dimension: with its own arguments, and with padded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from ...model.user_code import place
from .padded_values import PaddedValue

SHAPE_ONLY = frozenset(
    {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "sym_size", "sym_numel", "sym_stride"}
)
"""Operators that only use the shape, dtype and device of a tensor."""

UNWRITTEN = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Operators with uninitialized results, which are written before they are read.  A PaddedCall returns zeros instead."""


class ChangedByPadding(Exception):
    """The reason why a call must not be padded: a sentence about an operator."""


@dataclass(frozen=True, slots=True)
class Body:
    """The graph of a higher-order operator, at both sizes."""

    short: GraphModule
    long: GraphModule


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """A node with its (args, kwargs) at both sizes: `short`, `long`.  Both contain the same PaddedValue objects, `values`."""

    node: Node
    short: tuple[Any, Any]
    long: tuple[Any, Any]
    values: Sequence[PaddedValue]

    @property
    def name(self) -> str:
        return str(getattr(self.node.target, "__name__", self.node.target)).partition(".")[0]

    @property
    def depends(self) -> bool:
        return any(value.depends for value in self.values) and self.name not in (SHAPE_ONLY | UNWRITTEN)

    @property
    def grows(self) -> bool:
        """Whether anything differs between the two sizes."""
        constants = [
            [leaf for leaf in tree_leaves(args) if not isinstance(leaf, PaddedValue | Body)] for args in (self.short, self.long)
        ]
        return constants[0] != constants[1] or any(
            value.short is not value.long and (isinstance(value.short, torch.Tensor) or value.short != value.long)
            for value in self.values
        )

    def at_short(self, chosen: Mapping[int, tuple[Any, Any]]) -> Any:
        return self._run(self.short, lambda padded: chosen[id(padded)][0], lambda body: body.short)

    def at_long(self, chosen: Mapping[int, tuple[Any, Any]]) -> Any:
        return self._run(self.long, lambda padded: chosen[id(padded)][1], lambda body: body.long)

    def _run(self, arguments: Any, value: Callable[[PaddedValue], Any], body: Callable[[Body], GraphModule]) -> Any:
        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, PaddedValue):
                return value(leaf)
            return body(leaf) if isinstance(leaf, Body) else leaf

        args, kwargs = tree_map(concrete, arguments)
        output = self.node.target(*args, **kwargs)
        if getattr(self.node.target, "namespace", "") == "_c10d_functional":
            # the result of a collective is valid only after a wait
            output = tree_map(torch.ops._c10d_functional.wait_tensor, output)
        return tree_map(lambda leaf: torch.zeros_like(leaf), output) if self.name in UNWRITTEN else output


def place_of(node: Node) -> str:
    """Returns " (file:line: text)" of the user's code that a node comes from, or ""."""
    where, line = place(node)
    return f" ({where}: {line})" if where else ""
