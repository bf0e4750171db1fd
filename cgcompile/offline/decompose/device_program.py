"""Moves a program to cuda and runs it: replaces some operations, and reports errors with the user's source line.  Private interface
(torch 2.11, 2.13): the exceptions of `FakeTensorMode`."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.node import map_aggregate

from ...errors import CATALOGUE, BuildError, ModelError
from ...model.user_code import place
from ...targets.compiler_errors import explain, source_operator
from ...targets.cuda.lowering import repair
from .arguments import DEVICE
from .complex_numbers import Pair, is_complex, joined, run_on_pairs
from .decompositions import replacement

ASSERTIONS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_async.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
)
"""Assertions that the signature guarantees.  The runtime checks the signature before a call."""


def on_device(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copies the module without assertions.  Its operations create their tensors on cuda."""
    device_module = copy.deepcopy(module)
    for part in [m for m in device_module.modules() if isinstance(m, torch.fx.GraphModule)]:
        for node in list(part.graph.nodes):
            if node.target in ASSERTIONS and not node.users:
                part.graph.erase_node(node)
                continue
            node.args = map_aggregate(node.args, _move)
            node.kwargs = map_aggregate(node.kwargs, _move)
        repair(part)
    return device_module


def _move(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) else value


class Replacing(torch.fx.Interpreter):
    """Runs a program with the operations from `replacement`, and complex numbers as pairs.  Errors have the user's source line and
    the operator's name in `source`, the program before the rewrites."""

    def __init__(self, module: torch.fx.GraphModule, source: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # keeps torch from adding lines to the text of exceptions
        self._source = source

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            if n.op == "call_function" and is_complex(n):
                return _in_exported_order(n, run_on_pairs(n.target, *self.fetch_args_kwargs_from_env(n)))
            result = super().run_node(n)
            return _with_order_of(result, n.meta.get("val")) if replacement(n.target) else result
        except BuildError as error:
            if error.code != "operator-without-kernel":
                raise
            raise ModelError(
                "operator-without-kernel", f"{named_node(n)}: {error}", host_hint([source_operator(n, [self._source])])
            ) from error
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ModelError(
                "operator-without-kernel",
                f"{named_node(n)}: its result's shape, or what the program does next, depends on data",
                host_hint([source_operator(n, [self._source])]),
            ) from error
        except Exception as error:
            failure = explain(error, self._source)
            text = f"{named_node(n)} cannot be traced for cuda: {failure.cause}"
            raise BuildError("lowering-broken", text, failure.hint("eager")) from error

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return map_aggregate(super().output(target, args, kwargs), joined)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        function = replacement(target)
        output = super().call_function(function, args, kwargs) if function else NotImplemented
        return super().call_function(target, args, kwargs) if output is NotImplemented else output


def _in_exported_order(node: torch.fx.Node, output: Any) -> Any:
    """Returns the result of an operation on complex numbers with its axes in the memory order of the exported program.  Views stay
    unchanged, except view_as_real, which copies the parts of a pair into one tensor."""
    returned = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    view = any(argument.alias_info is not None for argument in returned) and node.target is not torch.ops.aten.view_as_real.default
    if not returned or view:
        return output
    like = node.meta.get("val")
    if isinstance(output, Pair):
        return Pair(_with_order_of(output.real, like), _with_order_of(output.imag, like))
    return _with_order_of(output, like)


def _with_order_of(result: Any, like: Any) -> Any:
    """Returns `result` with its axes in the memory order of `like`.  Later operations, above all views, were exported for this
    order."""
    if not isinstance(result, torch.Tensor) or not isinstance(like, torch.Tensor):
        return result
    strides = [stride if isinstance(stride, int) else int(stride.node.hint) for stride in like.stride()]
    order = sorted(range(result.dim()), key=lambda axis: (-strides[axis], axis))
    return result.permute(order).contiguous().permute([order.index(axis) for axis in range(result.dim())])


def source_line(node: torch.fx.Node) -> str:
    """The user's source line that a node comes from, such as "model.py:12", or ""."""
    return place(node)[0]


def named_node(node: torch.fx.Node) -> str:
    line = source_line(node)
    return f"{node.target}{f' at {line}' if line else ''}"


def host_hint(operators: Iterable[str]) -> str:
    """Returns the hint for operators without a Triton kernel: keep them on the host."""
    hint = CATALOGUE["operator-without-kernel"].hint
    options = " ".join([f"--fallback-op {name}" for name in dict.fromkeys(operators) if name])
    return f"{hint}; or keep it on the host: cgcompile build ... {options}" if options else hint
