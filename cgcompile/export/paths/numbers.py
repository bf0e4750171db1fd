"""Replaces numbers that Python read out of tensors, and numbers computed from them, by scalar tensors.  Operands and results of a
branch must be tensors.

Python computes with 64-bit numbers.  An operator casts a number to the dtype in which it computes, and so does the replacement.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

READS = (aten.item.default, aten._local_scalar_dense.default)

PYTHON: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.neg: aten.neg.default, operator.abs: aten.abs.default,
}  # fmt: skip
"""Python operator on numbers -> the same operator on tensors."""

CASTS: Mapping[Any, torch.dtype] = {math.trunc: torch.int64, torch.sym_float: torch.float64}
"""Traced function for `int()` or `float()` -> dtype of the result."""

BINARY: Mapping[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor, aten.add.Scalar: aten.add.Tensor, aten.sub.Tensor: aten.sub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor, aten.mul.Tensor: aten.mul.Tensor, aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor, aten.div.Scalar: aten.div.Tensor, aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor, aten.lt.Scalar: aten.lt.Tensor, aten.le.Scalar: aten.le.Tensor, aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
}  # fmt: skip
"""Operator on a tensor and a number -> the same operator on two tensors."""

FILLED = frozenset({aten.full.default, aten.scalar_tensor.default})
"""Operators that fill a new tensor with one number."""

ROUNDED = frozenset({torch.float16, torch.bfloat16})
"""Dtypes whose operators compute in float32."""


def with_tensors(graph: Graph) -> None:
    """Replaces reads of numbers, in place, if only supported operators use the numbers."""
    for node in list(graph.nodes):
        if node.target in READS:
            _Number(graph, node).settle()
    graph.lint()


def _takes_tensor(user: Node, number: Node) -> bool:
    """Whether an operation on a number has an equivalent with a tensor."""
    if user.target in FILLED:
        return user.args[-1] is number and number not in tree_leaves(user.args[:-1])
    return user.target in BINARY and not user.kwargs and user.args[1] is number and isinstance(user.args[0], Node)


class _Number:
    """A number that a graph reads, and all numbers that Python computes from it."""

    def __init__(self, graph: Graph, read: Node) -> None:
        self._graph, self._read = graph, read
        self._tensors: dict[Node, Node] = {}

    def settle(self) -> None:
        """Replaces the number, if all its users can take a tensor instead."""
        numbers, users = [self._read], []
        self._drop_range()
        for number in numbers:
            for user in number.users:
                if user.target in PYTHON or user.target in CASTS:
                    others = [leaf for leaf in user.all_input_nodes if leaf not in numbers]
                    if others:
                        return
                    numbers.append(user) if user not in numbers else None
                elif _takes_tensor(user, number):
                    users.append(user)
                else:
                    return
        (source,) = self._read.all_input_nodes
        value = source.meta["val"]
        if value.is_complex():
            return
        exact = torch.float64 if value.is_floating_point() else torch.int64
        if any(type(node.meta["val"]) is torch.SymFloat for node in numbers):
            exact = torch.float64
        with self._graph.inserting_before(self._read):
            flat = self._call(self._read, aten.reshape.default, (source, []))
            self._tensors[self._read] = self._call(self._read, aten._to_copy.default, (flat,), {"dtype": exact})
        for number in numbers[1:]:
            with self._graph.inserting_before(number):
                args = tuple(map_arg(number.args, lambda argument: self._tensors[argument]))
                self._tensors[number] = self._computed(number, args)
        for user in users:
            self._replace(user)
        for number in reversed(numbers):
            self._graph.erase_node(number)

    def _computed(self, number: Node, args: tuple[Any, ...]) -> Node:
        """Adds the tensor operation for a Python operation on replaced numbers."""
        if number.target in CASTS:
            return self._call(number, aten._to_copy.default, args, {"dtype": CASTS[number.target]})
        if number.target is operator.truediv:  # Python divides integers in float64, too
            integers = {value for value in args if isinstance(value, Node) and value.meta["val"].dtype != torch.float64}
            wide = {value: self._call(number, aten._to_copy.default, (value,), {"dtype": torch.float64}) for value in integers}
            args = tuple([wide.get(value, value) if isinstance(value, Node) else value for value in args])
        return self._call(number, PYTHON[number.target], args)

    def _drop_range(self) -> None:
        """Removes torch's assertion that a boolean is 0 or 1."""
        if self._read.all_input_nodes[0].meta["val"].dtype is not torch.bool:
            return
        for choice in [user for user in self._read.users if user.target is torch.sym_ite]:
            conditions = [user for user in choice.users if user.target in (operator.ge, operator.le)]
            for condition in conditions:
                for assertion in [user for user in condition.users if user.target is aten._assert_scalar.default]:
                    self._graph.erase_node(assertion)
            for node in [*[condition for condition in conditions if not condition.users], choice]:
                if not node.users:
                    self._graph.erase_node(node)

    def _replace(self, user: Node) -> None:
        """Replaces an operation on a number by one on a tensor."""
        if user.target in FILLED:
            self._fill(user)
            return
        tensor, number = user.args[:2]
        assert isinstance(tensor, Node) and isinstance(number, Node)
        value, wanted_value = tensor.meta["val"], user.meta["val"]
        stand_in = 1.0 if type(number.meta["val"]) is torch.SymFloat else 1
        dtype = torch.result_type(value, stand_in)
        wide = torch.float32 if dtype in ROUNDED else dtype
        with self._graph.inserting_before(user):
            left = tensor if value.dtype == wide else self._call(user, aten._to_copy.default, (tensor,), {"dtype": wide})
            right = self._call(user, aten._to_copy.default, (self._tensors[number],), {"dtype": wide})
            result = self._call(user, BINARY[user.target], (left, right, *user.args[2:]))
            if result.meta["val"].dtype != wanted_value.dtype:
                result = self._call(user, aten._to_copy.default, (result,), {"dtype": wanted_value.dtype})
        user.replace_all_uses_with(result)
        self._graph.erase_node(user)

    def _fill(self, user: Node) -> None:
        wanted_value = user.meta["val"]
        sizes = user.args[0] if user.target is aten.full.default else []
        with self._graph.inserting_before(user):
            number = self._tensors[user.args[-1]]
            if number.meta["val"].dtype != wanted_value.dtype:
                number = self._call(user, aten._to_copy.default, (number,), {"dtype": wanted_value.dtype})
            wide = self._call(user, aten.expand.default, (number, sizes))
            result = self._call(user, aten.clone.default, (wide,), {"memory_format": torch.contiguous_format})
        user.replace_all_uses_with(result)
        self._graph.erase_node(user)

    def _call(self, like: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
        node = self._graph.call_function(target, args, dict(kwargs or {}))
        node.meta = {name: like.meta[name] for name in ("stack_trace", "nn_module_stack") if name in like.meta}
        fake_value: Callable[..., Any] = lambda argument: argument.meta["val"]  # noqa: E731
        fake_arguments = map_arg((args, dict(kwargs or {})), fake_value)
        mode = next(value.fake_mode for value in tree_leaves(fake_arguments) if hasattr(value, "fake_mode"))
        with mode, torch.no_grad():
            node.meta["val"] = target(*fake_arguments[0], **fake_arguments[1])
        return node
