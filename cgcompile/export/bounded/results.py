"""Results of fixed size that follow from selected rows: rows that go back through the mask that selected them, and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.host_region import ASSERTS

from ...model.user_code import place
from ..torch_program import arguments
from .axes import Unsupported, depends, node_axes
from .interpreter import MASKS, Interpreter
from .row_wise import name_of

aten = torch.ops.aten

EMPTY = "that something is selected, of which a smallest or largest element is taken"


class ResultInterpreter(Interpreter):
    """An Interpreter that also runs what takes selected rows and gives a tensor of fixed size.

    `asserts`: an operation that fails for an empty selection may become an assertion.
    """

    def __init__(self, values: Mapping[Node, Any], counts: Any, *, asserts: bool) -> None:
        super().__init__(values, counts)
        self._asserts = asserts
        self._results: dict[str, Callable[[Node, Mapping[str, Any]], Tensor]] = {
            "index_put": self._put, "all": self._all, "any": self._any, "sum": self._sum, "mean": self._mean,
            "min": self._extreme, "max": self._extreme,
        }  # fmt: skip

    def run(self, node: Node) -> None:
        """Raises Unsupported."""
        if depends(node):
            super().run(node)
            return
        handler = self._results.get(name_of(node))
        if handler is not None:
            made: Any = handler(node, arguments(node))
        elif name_of(node) in ("all.dim", "any.dim", "sum.dim_IntList"):
            made = self._reduced(node, arguments(node))
        else:
            raise Unsupported(f"{node.target} of selected rows")
        wanted = node.meta["val"]
        if made.dtype != wanted.dtype or tuple(map(str, made.shape)) != tuple(map(str, wanted.shape)):
            raise Unsupported(str(node.target))
        self.values[node] = made

    def _put(self, node: Node, given: Mapping[str, Any]) -> Tensor:
        """`x[mask] = values`, where the same mask selected the rows that the values follow from."""
        target, indices, rows = given["self"], given["indices"], given["values"]
        mask = indices[0] if indices else None
        alone = mask is not None and all(other is None for other in indices[1:])
        if not alone or mask.meta["val"].dtype not in MASKS or mask not in self._selected or given["accumulate"] or depends(target):
            raise Unsupported(str(node.target))
        x, into = self.values[rows], self.values[target]
        axes, kept = node_axes(rows), mask.meta["val"].dim()
        if list(axes) != [0] or not self.counts.is_count(axes[0], self._selected[mask].count):
            raise Unsupported("rows of another selection")
        if x.dim() != 1 + into.dim() - kept or any(str(one) != str(two) for one, two in zip(x.shape[1:], into.shape[kept:], strict=True)):
            raise Unsupported("rows of another shape")
        true = self.values[mask] if mask.meta["val"].dtype is torch.bool else self.values[mask] != 0
        slots = (true.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(min=0)
        spread = x.index_select(0, slots).reshape([*true.shape, *into.shape[kept:]])
        return torch.where(true.reshape([*true.shape, *[1] * (into.dim() - kept)]), spread, into)

    def _whole(self, given: Mapping[str, Any], filling: float) -> Tensor:
        """The tensor that is reduced, with `filling` where nothing counts."""
        source = given["self"]
        return self.counts.masked(self.values[source], node_axes(source), filling)

    def _all(self, node: Node, given: Mapping[str, Any]) -> Tensor:
        made: Tensor = aten.all.default(self._whole(given, 1))
        return made

    def _any(self, node: Node, given: Mapping[str, Any]) -> Tensor:
        made: Tensor = aten.any.default(self._whole(given, 0))
        return made

    def _sum(self, node: Node, given: Mapping[str, Any]) -> Tensor:
        made: Tensor = aten.sum.default(self._whole(given, 0), dtype=given["dtype"])
        return made

    def _mean(self, node: Node, given: Mapping[str, Any]) -> Tensor:
        source = given["self"]
        wanted = node.meta["val"].dtype
        wide = torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted
        count = self._count(source).to(wide)
        return (aten.sum.default(self._whole(given, 0), dtype=wide) / count).to(wanted)

    def _extreme(self, node: Node, given: Mapping[str, Any]) -> Tensor:
        """The smallest or the largest of all elements: PyTorch raises where there is none."""
        dtype = node.meta["val"].dtype
        if not self._asserts or dtype is torch.bool:
            raise Unsupported(f"{node.target} of selected rows")
        where, line = place(node)
        aten._assert_async.msg(self._count(given["self"]) > 0, f"{where}: {ASSERTS}: {EMPTY}: {line}")
        smallest = name_of(node) == "min"
        if dtype.is_floating_point:
            filling: float = float("inf") if smallest else float("-inf")
        else:
            filling = torch.iinfo(dtype).max if smallest else torch.iinfo(dtype).min
        made: Tensor = (aten.min if smallest else aten.max).default(self._whole(given, filling))
        return made

    def _count(self, source: Node) -> Tensor:
        """How many elements count."""
        value, axes = self.values[source], node_axes(source)
        fixed = 1
        for axis, size in enumerate(value.shape):
            fixed = fixed * (1 if axis in axes else size)
        count: Any = fixed
        for expr in axes.values():
            count = self.counts.of(expr) * count
        return count


def takes_selected(node: Node) -> bool:
    """Whether an argument of a node depends on data, or its size does."""
    return any(isinstance(leaf, Node) and depends(leaf) for leaf in tree_leaves((node.args, node.kwargs)))
