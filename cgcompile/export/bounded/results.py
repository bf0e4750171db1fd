"""Runs operators that take selected rows and return tensors of fixed sizes: writes through the same mask, and reductions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.host_region import ASSERTS

from ...model.devices.markers import TO_HOST
from ...model.user_code import place
from ..torch_program import arguments
from .axes import Counts, Unsupported, data_size, depends, node_axes
from .interpreter import MASKS, Interpreter
from .row_wise import is_pointwise, name_of

aten = torch.ops.aten

EMPTY = "the selection must not be empty, because its minimum or maximum is needed"


class ResultInterpreter(Interpreter):
    """An Interpreter that also runs operators that take selected rows and return a tensor of fixed size.

    It adds an assertion to an operation that fails on an empty selection.  With `told_gpu` the assertion runs on the host.  `low`:
    lower bounds of sizes on this path, by symbol (default 0).
    """

    def __init__(
        self, values: Mapping[Node, Any], counts: Counts, *, told_gpu: bool, same: Mapping[Node, Node], low: Mapping[Any, int]
    ) -> None:
        super().__init__(values, counts, told_gpu=told_gpu, same=same)
        self._low = low
        self._results: dict[str, Callable[[Node, Mapping[str, Any]], Tensor]] = {
            "index_put": self._put, "all": self._all, "any": self._any, "sum": self._sum, "mean": self._mean,
            "min": self._extreme, "max": self._extreme, "index_add": self._add, "index_copy": self._copy,
            "scalar_tensor": self._number, "mean.dim": self._mean_along, "kthvalue": self._kth,
        }  # fmt: skip

    def run(self, node: Node) -> None:
        """Runs a node.  Raises Unsupported."""
        if depends(node):
            super().run(node)
            return
        if node.target is operator.getitem:
            self.values[node] = self._plain(node)
            return
        handler = self._results.get(name_of(node))
        if handler is not None:
            result: Any = handler(node, arguments(node))
        elif is_pointwise(node) and not any(map(node_axes, node.all_input_nodes)):
            result = self._rows(node)  # the operator uses a size as a value
        elif name_of(node) in ("all.dim", "any.dim", "sum.dim_IntList"):
            result = self._reduced(node, arguments(node))
        else:
            raise Unsupported(f"{node.target} of selected rows")
        expected = node.meta["val"]
        for actual, like in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            if isinstance(like, Tensor) and (actual.dtype, [*map(str, actual.shape)]) != (like.dtype, [*map(str, like.shape)]):
                raise Unsupported(str(node.target))
        self.values[node] = result

    def _put(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        """Runs `x[mask] = values` if `values` has a row for each row that this mask selected; or `x[positions] = values`."""
        target, indices, rows = inputs["self"], inputs["indices"], inputs["values"]
        if indices and all(index is None or index.meta["val"].dtype not in MASKS for index in indices):
            return self._put_at(node, target, indices, rows, inputs["accumulate"])
        mask: Any = self.first(indices[0]) if indices else None
        only_mask = mask is not None and all(other is None for other in indices[1:])
        if (
            not only_mask
            or mask.meta["val"].dtype not in MASKS
            or mask not in self._selected
            or inputs["accumulate"]
            or depends(target)
        ):
            raise Unsupported(str(node.target))
        x, into = self.values[rows], self.values[target]
        axes, mask_rank = node_axes(rows), mask.meta["val"].dim()
        if list(axes) != [0] or not self.counts.is_count(axes[0], self._selected[mask].count):
            raise Unsupported("rows that another mask selected")
        if x.dim() != 1 + into.dim() - mask_rank or any(
            str(one) != str(two) for one, two in zip(x.shape[1:], into.shape[mask_rank:], strict=True)
        ):
            raise Unsupported("rows of another shape")
        true = self.values[mask] if mask.meta["val"].dtype is torch.bool else self.values[mask] != 0
        slots = (true.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(min=0)
        spread = x.index_select(0, slots).reshape([*true.shape, *into.shape[mask_rank:]])
        return torch.where(true.reshape([*true.shape, *[1] * (into.dim() - mask_rank)]), spread, into)

    def _put_at(self, node: Node, target: Node, indices: Sequence[Any], rows: Node, accumulate: bool) -> Tensor:
        """Runs `x[positions] = values`.  Padding is written to an extra last row, which is removed."""
        first = indices[0]
        if first is None or depends(target) or any(index is None for index in indices):
            raise Unsupported(str(node.target))
        axes, into = node_axes(first), self.values[target]
        if first.meta["val"].dim() != 1 or any(node_axes(index) != axes or index.meta["val"].dim() != 1 for index in indices):
            raise Unsupported("positions of several axes")
        x = self.values[rows]
        if node_axes(rows) and (node_axes(rows) != axes or x.dim() != 1 + into.dim() - len(indices)):
            raise Unsupported("rows that another mask selected")
        places = [self.counts.masked(self.values[index], node_axes(index)) for index in indices]
        first_places = torch.where(places[0] < 0, places[0] + into.shape[0], places[0])
        places = [self._behind(first_places, first, into.shape[0]), *places[1:]]
        wide = torch.cat([into, into.new_zeros([1, *into.shape[1:]])])
        return aten.index_put.default(wide, places, x, accumulate)[: into.shape[0]]

    def _behind(self, positions: Tensor, index: Node, size: Any) -> Tensor:
        """Returns positions, with `size` (the extra row) for padding.  Positions out of bounds become `size` with `told_gpu`,
        otherwise `size + 1`, which raises."""
        valid = self.counts.valid(positions, node_axes(index))
        out_of_bounds = size if self._told_gpu else size + 1
        positions = torch.where((positions < 0) | (positions >= size), out_of_bounds, positions)
        return positions if valid is None else torch.where(valid, positions, size)

    def _rows_at(self, node: Node, inputs: Mapping[str, Any], operator: Any, **more: Any) -> Tensor:
        """Runs `x.index_add(0, positions, values)` and `index_copy`.  Padding is written to an extra last row."""
        target, index, rows = inputs["self"], inputs["index"], inputs["source"]
        into, x, axes = self.values[target], self.values[rows], node_axes(index)
        if inputs["dim"] % max(1, into.dim()) or depends(target) or list(axes) != [0] or node_axes(rows) != axes or not into.dim():
            raise Unsupported(str(node.target))
        places = self._behind(self.values[index], index, into.shape[0])
        wide = torch.cat([into, into.new_zeros([1, *into.shape[1:]])])
        result: Tensor = operator(wide, 0, places, x, **more)
        return result[: into.shape[0]]

    def _add(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        return self._rows_at(node, inputs, aten.index_add.default, alpha=inputs["alpha"])

    def _copy(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        return self._rows_at(node, inputs, aten.index_copy.default)

    def _number(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        """Returns a data-dependent size as a tensor."""
        size = data_size(inputs["s"].meta["val"])
        if size is None or not self.counts.knows(size):
            raise Unsupported(str(node.target))
        return self.counts.of(size).to(node.meta["val"].dtype)

    def _whole(self, inputs: Mapping[str, Any], filling: float) -> Tensor:
        """Returns the tensor to reduce, with `filling` in its padding."""
        source = inputs["self"]
        return self.counts.masked(self.values[source], node_axes(source), filling)

    def _all(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        result: Tensor = aten.all.default(self._whole(inputs, 1))
        return result

    def _any(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        result: Tensor = aten.any.default(self._whole(inputs, 0))
        return result

    def _sum(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        result: Tensor = aten.sum.default(self._whole(inputs, 0), dtype=inputs["dtype"])
        return result

    def _mean(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        source = inputs["self"]
        expected = node.meta["val"].dtype
        wide = torch.float32 if expected in (torch.float16, torch.bfloat16) else expected
        count = self._count(source).to(wide)
        return (aten.sum.default(self._whole(inputs, 0), dtype=wide) / count).to(expected)

    def _mean_along(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        """Computes the mean along all bounded axes, and maybe further axes."""
        source, expected = inputs["self"], node.meta["val"].dtype
        value, axes = self.values[source], node_axes(source)
        named = inputs["dim"] if isinstance(inputs["dim"], list | tuple) else [inputs["dim"]]
        over = {axis % value.dim() for axis in named if axis is not None} or set(range(value.dim()))
        if not set(axes) <= over:
            raise Unsupported(str(node.target))
        wide = torch.float32 if expected in (torch.float16, torch.bfloat16) else expected
        fixed: Any = 1
        for axis in over - set(axes):
            fixed = fixed * value.shape[axis]
        count: Any = fixed
        for expr in axes.values():
            count = self.counts.of(expr) * count
        total = aten.sum.dim_IntList(self._whole(inputs, 0), sorted(over), inputs["keepdim"], dtype=wide)
        return (total / count.to(wide)).to(expected)

    def _extreme(self, node: Node, inputs: Mapping[str, Any]) -> Tensor:
        """Computes the smallest or largest element.  Asserts that there is one, since PyTorch raises for an empty tensor."""
        dtype = node.meta["val"].dtype
        if dtype is torch.bool:
            raise Unsupported(f"{node.target} of selected rows")
        where, line = place(node)
        not_empty = self._count(inputs["self"]) > 0
        not_empty = TO_HOST(not_empty) if self._told_gpu else not_empty
        aten._assert_async.msg(not_empty, f"{where}: {ASSERTS}: {EMPTY}: {line}")
        smallest = name_of(node) == "min"
        if dtype.is_floating_point:
            filling: float = float("inf") if smallest else float("-inf")
        else:
            filling = torch.iinfo(dtype).max if smallest else torch.iinfo(dtype).min
        result: Tensor = (aten.min if smallest else aten.max).default(self._whole(inputs, filling))
        return result

    def _kth(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        """Computes the k-th smallest element along a bounded axis of at least k elements.  Padding is NaN, which sorts last."""
        source, k = inputs["self"], inputs["k"]
        axes, axis = node_axes(source), inputs["dim"] % source.meta["val"].dim()
        if list(axes) != [axis] or type(k) is not int or self._low.get(axes[axis], 0) < k:
            raise Unsupported(f"{node.target} of selected rows")
        if not source.meta["val"].is_floating_point():
            raise Unsupported(f"{node.target} of integers")
        return aten.kthvalue.default(self._whole(inputs, nan), k, axis, inputs["keepdim"])

    def _count(self, source: Node) -> Tensor:
        """Returns the number of valid elements."""
        value, axes = self.values[source], node_axes(source)
        fixed = 1
        for axis, size in enumerate(value.shape):
            fixed = fixed * (1 if axis in axes else size)
        count: Any = fixed
        for expr in axes.values():
            count = self.counts.of(expr) * count
        return count


def takes_selected(node: Node) -> bool:
    """Whether an argument of a node is, or has, a size that depends on data."""
    return any(isinstance(leaf, Node) and depends(leaf) for leaf in tree_leaves((node.args, node.kwargs)))
