"""Runs the part of a program whose sizes depend on data, with the largest possible sizes.

Private interfaces (torch 2.11, 2.13): `torch._dispatch.python.enable_python_dispatcher`, `torch.fx.traceback.preserve_node_meta`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from ..torch_program import arguments, spell_counts
from .axes import Counts, Unsupported, axes_of, data_size, depends, node_axes
from .row_wise import check_rows, is_pointwise, name_of
from .selections import Selected, kept_boxes, selected, sort, unique

aten = torch.ops.aten

MASKS = (torch.bool, torch.uint8)
"""Dtypes of an index that is a mask."""

INDEXED = {"index_select": "index", "gather": "index", "embedding": "indices"}
"""Operators with indices, and the argument that has the indices."""

DIVISIONS = frozenset(["floor_divide", "remainder.Tensor", "remainder.Scalar_Tensor", "fmod.Tensor", "div.Tensor_mode"])
"""Integer operators that may trap if the divisor is 0."""

SIZED = frozenset({
    "_unsafe_view", "arange", "expand", "flatten.using_ints", "full", "new_full", "new_ones", "new_zeros", "ones",
    "reshape", "slice.Tensor", "unflatten.int", "view", "zeros",
})  # fmt: skip
"""Operators that take numbers only as sizes."""

NUMBERS = (aten.sym_size.int, torch.sym_min, torch.sym_max)
"""Operators that return a number, besides Python's operators."""

NEUTRAL: dict[str, float] = {
    "sum.dim_IntList": 0, "any.dim": 0, "any.dims": 0, "all.dim": 1, "all.dims": 1, "softmax.int": -inf, "log_softmax.int": -inf,
}  # fmt: skip
"""Operators along an axis, and their neutral element."""

PRODUCTS = ("matmul", "mm", "bmm")


class Interpreter:
    """Runs nodes.  `values`: inputs from the rest of the program, and the padded results so far.  `counts`: the true sizes.
    `same`: node -> the first node with the same computation.  `told_gpu`: the bundle is for a GPU.

    Eager PyTorch raises for an index beyond the selected rows.  The interpreter replaces such an index by one that is out of
    bounds, but not with `told_gpu`: on a GPU this index would access other memory, or make the GPU unusable.
    """

    def __init__(
        self, values: Mapping[Node, Any], counts: Counts, *, told_gpu: bool, same: Mapping[Node, Node] = MappingProxyType({})
    ) -> None:
        self.values: dict[Node, Any] = dict(values)
        self.counts = counts
        self._told_gpu, self._same = told_gpu, same
        self._selected: dict[Node, Selected] = {}
        self._own: dict[str, Callable[[Node, Mapping[str, Any]], Any]] = {
            "nonzero": self._nonzero, "argwhere": self._nonzero, "nonzero_numpy": self._positions, "where": self._positions,
            "index.Tensor": self._index, "masked_select": self._masked_select, "_unique2": self._unique,
            "unique_consecutive": self._unique_consecutive, "slice.Tensor": self._slice, "sort": self._sort,
            "sort.stable": self._sort, "argsort": self._sort, "argsort.stable": self._sort, "cat": self._joined,
            "split_with_sizes": self._split, "einsum": self._einsum,
        }  # fmt: skip

    def run(self, node: Node) -> None:
        """Runs a node.  Raises Unsupported."""
        self.values[node] = self._result(node)

    def masked(self, node: Node) -> Tensor:
        """Returns a node's result with zeros in the padding."""
        outcome: Tensor = self.counts.masked(self.values[node], node_axes(node))
        return outcome

    def _result(self, node: Node) -> Any:
        if node.op != "call_function":
            raise Unsupported(node.op)
        if isinstance(node.target, torch._ops.OpOverload) and str(node.target) == "torchvision.nms.default":
            return self._suppressed(node)
        if node.target in NUMBERS or getattr(node.target, "__module__", "") == "_operator":
            return self._plain(node)
        if isinstance(node.meta.get("val"), torch.SymInt):
            raise Unsupported("a number that is read out of a tensor, as a size")
        if not name_of(node):
            raise Unsupported(str(node.target))
        inputs = arguments(node)
        handler = self._own.get(name_of(node))
        if handler is not None:
            return handler(node, inputs)
        if name_of(node) in NEUTRAL:
            return self._reduced(node, inputs)
        if name_of(node) in PRODUCTS:
            return self._product(node)
        return self._rows(node)

    def _plain(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        return node.target(*args, **kwargs)

    def _rows(self, node: Node) -> Any:
        """Runs an operator that computes rows independently.  In the padding, indices are 0 and divisors are 1."""
        check_rows(node)
        name = name_of(node)
        inputs = arguments(node)
        if any(isinstance(value, Node) and depends(value) for value in [inputs.get("fill_value"), inputs.get("start")]):
            raise Unsupported(f"{node.target} of a size")  # the operator uses the size as a value
        positions = inputs.get(INDEXED.get(name, ""))
        divisor = node.args[1] if name in DIVISIONS else None

        def value(operand: Node) -> Any:
            outcome = self.values[operand]
            if operand is positions and name in ("gather", "index_select"):
                source = inputs["self"]
                axis = inputs["dim"] % max(1, source.meta["val"].dim())
                return self._positions_in(operand, source, axis)
            if isinstance(outcome, Tensor):
                filling = 1 if operand is divisor else 0
                return self.counts.masked(outcome, node_axes(operand), filling) if operand in (positions, divisor) else outcome
            if data_size(operand.meta.get("val")) is None or name in SIZED:
                return outcome
            if not is_pointwise(node):
                raise Unsupported(f"{node.target} of a size")
            return self.counts.of(data_size(operand.meta["val"]))

        args, kwargs = map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)

    def _reduced(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        """Runs a reduction along an axis.  The padding of bounded axes gets the operator's neutral element."""
        source, name = inputs["self"], name_of(node)
        axes, rank = node_axes(source), source.meta["val"].dim()
        named = inputs["dim"]
        over = {axis % rank for axis in (named if isinstance(named, list | tuple) else [named])} if named else set(axes)
        over = {named % rank} if isinstance(named, int) else over
        mixed = {axis: expr for axis, expr in axes.items() if axis in over}
        if mixed and NEUTRAL[name] == -inf and not source.meta["val"].is_floating_point():
            raise Unsupported(str(node.target))
        x = self.counts.masked(self.values[source], mixed, NEUTRAL[name])
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: x if operand is source else self.values[operand])
        return node.target(*args, **kwargs)

    def _product(self, node: Node) -> Any:
        """Runs a matrix product with zeros in the padding of the summed axes."""
        factors = []
        for place, argument in enumerate(node.args):
            rank, axes = argument.meta["val"].dim(), node_axes(argument)
            summed = rank - 1 if place == 0 or rank == 1 else rank - 2
            factors.append(self.counts.masked(self.values[argument], {axis: expr for axis, expr in axes.items() if axis == summed}))
        return node.target(*factors)

    def _einsum(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        """Runs an einsum with zeros in the padding of the summed axes."""
        letters, _, output_letters = inputs["equation"].replace(" ", "").partition("->")
        if "." in letters or "->" not in inputs["equation"]:
            raise Unsupported(str(node.target))
        factors = []
        for names, tensor in zip(letters.split(","), inputs["tensors"], strict=True):
            summed = {axis: expr for axis, expr in node_axes(tensor).items() if names[axis] not in output_letters}
            if any(names.count(names[axis]) > 1 for axis in node_axes(tensor)):
                raise Unsupported(str(node.target))
            factors.append(self.counts.masked(self.values[tensor], summed))
        return aten.einsum.default(inputs["equation"], factors)

    # --- selections -------------------------------------------------------------------------------------------

    def first(self, node: Any) -> Any:
        """Returns the first node with the same computation, or the node itself."""
        return self._same.get(node, node)

    def _select(self, mask: Node, result: Any) -> Selected:
        """Returns the positions at which a mask is true.  `result`: the value with an axis for these positions."""
        if not mask.meta["val"].dim():
            raise Unsupported("a mask without axes")
        mask = self.first(mask)
        full_size = node_axes(mask).get(0) if mask.meta["val"].dim() == 1 else None
        if mask not in self._selected:
            true = self.values[mask] if mask.meta["val"].dtype is torch.bool else self.values[mask] != 0
            valid = self.counts.valid(true, node_axes(mask))
            outcome = selected(true if valid is None else true & valid)
            self.counts.define(self._new(result), outcome.count, outcome.positions[0].shape[0], full_size)
            self._selected[mask] = outcome
        elif not any(self.counts.is_count(expr, self._selected[mask].count) for expr in _sizes(result)):
            outcome = self._selected[mask]
            self.counts.define(self._new(result), outcome.count, outcome.positions[0].shape[0], full_size)
        return self._selected[mask]

    def _new(self, result: Any) -> Any:
        """Returns the new symbol in a result's shape: the size of a selection.  Raises Unsupported unless there is exactly one."""
        fresh = [expr for expr in _sizes(result) if not self.counts.knows(expr)]
        if len(fresh) != 1:
            raise Unsupported("the size of a selection")
        return fresh[0]

    def _nonzero(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        return torch.stack(self._select(inputs["self"], node.meta["val"]).positions, 1)

    def _positions(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        source = inputs.get("condition", inputs.get("self"))
        return list(self._select(source, node.meta["val"]).positions)

    def _index(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        indices: list[Tensor | None] = []
        for index_node in inputs["indices"]:
            if index_node is None:
                indices.append(None)
            elif index_node.meta["val"].dtype in MASKS:
                indices += self._select(index_node, node.meta["val"]).positions
            else:
                indices.append(self._positions_in(index_node, inputs["self"], len(indices), negative=True))
        return aten.index.Tensor(self.values[inputs["self"]], indices)

    def _positions_in(self, node: Node, source: Node, axis: int, *, negative: bool = False) -> Tensor:
        """Returns indices along an axis of a tensor, with 0 in the padding.  `negative`: -1 is the last valid row."""
        positions = self.counts.masked(self.values[node], node_axes(node))
        size = node_axes(source).get(axis)
        if size is None:
            return positions
        count = self.counts.of(size)
        if negative:
            positions = torch.where(positions < 0, positions + count, positions)
        if self._told_gpu:
            return positions
        beyond, valid = (positions < 0) | (positions >= count), self.counts.valid(positions, node_axes(node))
        return torch.where(beyond if valid is None else beyond & valid, self.values[source].shape[axis], positions)

    def _masked_select(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        source, mask = inputs["self"], inputs["mask"]
        if source.meta["val"].shape != mask.meta["val"].shape:
            if node_axes(source) or node_axes(mask):
                raise Unsupported("masked_select of a mask of another shape")
            x, true = torch.broadcast_tensors(self.values[source], self.values[mask])
            outcome = selected(true)
            self.counts.define(self._new(node.meta["val"]), outcome.count, outcome.positions[0].shape[0])
            return aten.index.Tensor(x, list(outcome.positions))
        return aten.index.Tensor(self.values[source], list(self._select(mask, node.meta["val"]).positions))

    def _suppressed(self, node: Node) -> Any:
        boxes, scores, threshold = node.args
        outcome = kept_boxes(
            self.values[boxes], self.values[scores], threshold, self.counts.valid(self.values[scores], node_axes(scores))
        )
        self.counts.define(self._new(node.meta["val"]), outcome.count, outcome.positions[0].shape[0])
        return outcome.positions[0]

    def _unique(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        if not inputs["sorted"]:
            raise Unsupported("unique without an order")
        return self._different(node, inputs["self"], ordered=True)

    def _unique_consecutive(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        source = inputs["self"]
        if inputs["dim"] is not None or not set(node_axes(source)) <= {0}:
            raise Unsupported("unique_consecutive along an axis")
        return self._different(node, source, ordered=False)

    def _different(self, node: Node, source: Node, *, ordered: bool) -> Any:
        x = self.values[source]
        valid = self.counts.valid(x, node_axes(source))
        outcome = unique(x, None if valid is None else valid.expand(x.shape), ordered=ordered)
        self.counts.define(self._new(node.meta["val"][0]), outcome.count, outcome.values.shape[0])
        return outcome.values, outcome.inverse, outcome.counts

    # --- along a bounded axis ---------------------------------------------------------------------------------

    def _slice(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        """Runs `x[:k]`, which has at most k elements."""
        source, dim, end = inputs["self"], inputs["dim"], inputs["end"]
        axis = dim % source.meta["val"].dim()
        if axis not in node_axes(source):
            return self._rows(node)
        x = self.values[source]
        size, expr, full_size = x.shape[axis], node_axes(node).get(axis), node_axes(source)[axis]
        if inputs["start"] not in (None, 0) or inputs["step"] != 1:
            raise Unsupported("a slice of an axis whose size depends on data")
        if isinstance(end, Node):
            part = data_size(end.meta["val"])
            if part is None or expr is None or not self.counts.part_of(part, full_size):
                raise Unsupported("a slice of an axis whose size depends on data")
            if not self.counts.knows(expr):
                self.counts.same(expr, part)
            elif self.counts.of(expr) is not self.counts.of(part):
                raise Unsupported("the size of a part")
            return x
        if not (end is None or (type(end) is int and end >= 0)):
            raise Unsupported("a slice of an axis whose size depends on data")
        if expr is not None and not self.counts.knows(expr):  # torch may use a new symbol for the size of a slice
            count = self.counts.of(full_size)
            self.counts.define(expr, count if end is None else count.clamp(max=end), size, full_size)
        shorter = end is not None and type(size) is int and end < size
        return aten.slice.Tensor(x, axis, 0, end) if shorter else x

    def _split(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        """Splits a bounded axis into consecutive parts of sizes that depend on data."""
        source, axis = inputs["self"], inputs["dim"] % inputs["self"].meta["val"].dim()
        if axis not in node_axes(source):
            return self._rows(node)
        x, parts, begin = self.values[source], [], 0
        for size in inputs["split_sizes"]:
            expr = data_size(size.meta["val"]) if isinstance(size, Node) else None
            if expr is None or not self.counts.knows(expr):
                raise Unsupported("parts of a bounded axis")
            rows = begin + torch.arange(self.values[size], device=x.device)
            parts.append(x.index_select(axis, rows.clamp(max=x.shape[axis] - 1)))
            begin = begin + self.counts.of(expr)
        return parts

    def _joined(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        """Concatenates tensors along a bounded axis.  Valid elements of all parts come first."""
        parts = inputs["tensors"]
        axis = inputs["dim"] % node.meta["val"].dim()
        if axis not in node_axes(node) or any(part.meta["val"].dim() != node.meta["val"].dim() for part in parts):
            return self._rows(node)
        rows = []
        for part in parts:
            x = self.values[part]
            valid = self.counts.valid(x, {place: expr for place, expr in node_axes(part).items() if place == axis})
            rows.append(x.new_ones(x.shape[axis], dtype=torch.bool) if valid is None else valid.reshape(-1))
        ((places,), _) = selected(torch.cat(rows))
        return torch.cat([self.values[part] for part in parts], axis).index_select(axis, places)

    def _sort(self, node: Node, inputs: Mapping[str, Any]) -> Any:
        source = inputs["self"]
        rank = source.meta["val"].dim()
        axis = inputs["dim"] % rank if rank else 0
        if axis not in node_axes(source):
            return self._rows(node)
        x = self.values[source]
        outcome = sort(x, self.counts.valid(x, {axis: node_axes(source)[axis]}), axis, inputs["descending"])
        return outcome[1] if name_of(node).startswith("argsort") else outcome


def taken_by(region: Sequence[Node]) -> list[Node]:
    """Returns the inputs of `region` from the rest of the program.  Raises Unsupported if one depends on data, or is a graph."""
    members = set(region)
    inputs = list(dict.fromkeys([source for node in region for source in node.all_input_nodes if source not in members]))
    if any("val" not in node.meta for node in inputs) or any(map(depends, inputs)):
        raise Unsupported("an operator takes a nested graph, or an input that depends on data")
    return inputs


def traced(padded: Callable[..., Any], taken: Sequence[Node]) -> GraphModule:
    """Traces `padded`, a function of the values of the nodes `taken`.  Raises Unsupported if PyTorch cannot compute it."""
    values = [node.meta["val"] for node in taken]
    mode = next(leaf.fake_mode for leaf in tree_leaves(values) if hasattr(leaf, "fake_mode"))
    with mode, enable_python_dispatcher(), torch.no_grad(), preserve_node_meta():
        try:
            module = make_fx(padded)(*values)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, KeyError) as error:
            raise Unsupported("PyTorch cannot compute it at the bound") from error
    module.graph.eliminate_dead_code()
    spell_counts(module.graph)
    return module


def _sizes(result: Any) -> list[Any]:
    """Returns the sizes in a result that depend on data."""
    return list(dict.fromkeys([expr for leaf in tree_leaves(result) for expr in axes_of(leaf).values()]))


def chain(nodes: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
    """Returns the nodes, in order, that compute outputs with data-dependent sizes from values of fixed sizes.  Includes all results
    of a node that has several."""
    waiting, region = [node for node in outputs if depends(node)], set()
    while waiting:
        node = waiting.pop()
        if node not in region:
            region.add(node)
            waiting += [source for source in node.all_input_nodes if depends(source)]
    for node in list(region):
        region.update([user for user in node.users if user.target is operator.getitem])
    return [node for node in nodes if node in region]
