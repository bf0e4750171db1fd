"""Symbols in code for the CPU: sizes that vary, and numbers in assertions of the model.

While Inductor lowers a program, the symbols of its sizes are frozen: if torch evaluates `batch >= 16`, it uses the size in the
example, and keeps no guard.  Such an answer must hold for all sizes, else the build is refused.  The answer would also narrow the
symbol's range.  With sizes 1 and 16, the range 1 to 16 would become 16 alone.  The code would then write 16 rows for every call
(torch 2.11 and 2.13: a 3 x 3 convolution).  So answers do not narrow ranges here.

Two answers may differ between sizes.  The answer that selects an implementation of a convolution affects only the layout of memory,
so it may be that of the example.  The default of `guard_or_false` and `guard_or_true` is correct for all sizes.  These functions
return it if the condition differs between sizes, for example for small products that Inductor computes without a library.  Any
other answer has to be the same for the smallest and the largest sizes.

If an assertion about a number fails, the message of Inductor's code has Inductor's name of the number ("Expected u8 >= 20 but
received 12"), and no line of the model.  So this module adds the line of the assertion, or else the line that reads the number.

Private interfaces (torch 2.11, 2.13): `ShapeEnv._check_frozen` and `ShapeEnv._maybe_guard_rel`, `torch._C._select_conv_backend`,
`symbolic_shapes._guard_or`, `canonicalize_bool_expr`, `torch._inductor.ir.AssertScalar`,
`GraphLowering.create_deferred_runtime_asserts`, and the expression of a SymInt or SymBool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx.experimental.symbolic_shapes as symbolic_shapes
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, canonicalize_bool_expr

from ...errors import BuildError
from ...export.assertions import asserted
from ...model.user_code import place

MAKING = "create_deferred_runtime_asserts"
"""The method of Inductor that generates assertions about the numbers that a node reads."""

METHODS = (
    (ShapeEnv, "_check_frozen"), (ShapeEnv, "_maybe_guard_rel"), (torch._C, "_select_conv_backend"), (symbolic_shapes, "_guard_or"),
)  # fmt: skip


@contextmanager
def decided_alike(program: ExportedProgram) -> Iterator[None]:
    """While active, makes Inductor generate code for all sizes of `program`.  At its end raises size-decides if an answer of torch
    differs between the example's sizes and the smallest or largest sizes.  Raises torch-unsupported."""
    for owner, name in METHODS:
        if not hasattr(owner, name):
            raise BuildError(
                "torch-unsupported", f"torch {torch.__version__} has no {name}; cgcompile was tested with 2.11 and 2.13"
            )
    limits = _limits(program)
    answers: dict[Any, Any] = {}
    note, narrow, guard = ShapeEnv._check_frozen, ShapeEnv._maybe_guard_rel, symbolic_shapes._guard_or

    def noted(self: Any, expr: Any, value: Any) -> None:
        if self.frozen and _has_limits(expr, limits):
            answers.setdefault(expr, value)
        note(self, expr, value)

    def narrowed(self: Any, expr: Any) -> None:
        if not (self.frozen and _has_limits(expr, limits)):
            narrow(self, expr)

    def general(condition: Any, default: bool) -> bool:
        expr = condition.node.expr if isinstance(condition, torch.SymBool) else None
        if _has_limits(expr, limits) and _differing_sizes(expr, not default, limits, {}) is not None:
            return default
        return bool(guard(condition, default))

    with (
        patch.object(*METHODS[3], general),
        patch.object(*METHODS[0], noted),
        patch.object(*METHODS[1], narrowed),
        patch.object(*METHODS[2], _with_example_sizes(torch._C._select_conv_backend)),
    ):
        yield
    axes = _axes(program)
    for expr, value in answers.items():
        if (other := _differing_sizes(expr, value, limits, axes)) is not None:
            text = f"torch compiles different code for {other} than for the example's sizes, where {expr} is {value}"
            raise BuildError("size-decides", text)


def _axes(program: ExportedProgram) -> dict[Any, str]:
    """Returns, for each symbol, the first axis of an input whose size it is, such as "axis 1 of input 0"."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    inputs = values[len(values) - len(program.graph_signature.user_inputs) :]
    axes: dict[Any, str] = {}
    for number, value in enumerate(inputs):
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                axes.setdefault(size.node.expr, f"axis {axis} of input {number}")
    return axes


def _limits(program: ExportedProgram) -> dict[Any, tuple[int, int]]:
    """Returns the smallest and the largest value of each symbol of the input shapes."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape if isinstance(size, torch.SymInt)]
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols} & program.range_constraints.keys()
    ranges = {symbol: program.range_constraints[symbol] for symbol in symbols}
    return {symbol: (int(span.lower), int(span.upper)) for symbol, span in ranges.items() if isinstance(span.upper, sympy.Integer)}


def _has_limits(expr: Any, limits: Mapping[Any, tuple[int, int]]) -> bool:
    symbols = getattr(expr, "free_symbols", None)
    return symbols is not None and bool(symbols) and symbols <= limits.keys()


def _differing_sizes(expr: Any, value: Any, limits: Mapping[Any, tuple[int, int]], axes: Mapping[Any, str]) -> str | None:
    """Returns the smallest and largest sizes at which `expr` is not `value`, as text, or None."""
    symbols = sorted(expr.free_symbols, key=str)
    for corner in product(*[limits[symbol] for symbol in symbols]):
        if sympy.sympify(expr.subs(dict(zip(symbols, corner, strict=True)))) != value:
            named = [(f"{symbol}={size}", axes.get(symbol, "")) for symbol, size in zip(symbols, corner, strict=True)]
            return ", ".join([f"{text} ({axis})" if axis else text for text, axis in named])
    return None


def _with_example_sizes(select: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `select` so that it gets the sizes of the example instead of symbols."""

    def selected(*args: Any, **kwargs: Any) -> Any:
        return select(*[_plain(argument) for argument in args], **{name: _plain(argument) for name, argument in kwargs.items()})

    return selected


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = [_number(size) for size in value.shape], [_number(stride) for stride in value.stride()]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _number(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


@contextmanager
def named_assertions(program: ExportedProgram) -> Iterator[None]:
    """While active, makes the messages of assertions about numbers name their line of the model.  Raises torch-unsupported."""
    if not hasattr(ir, "AssertScalar") or not hasattr(GraphLowering, MAKING):
        raise BuildError("torch-unsupported", f"torch {torch.__version__}: Inductor has no AssertScalar; tested were 2.11 and 2.13")
    lines = _assertions(program)
    plain, making = ir.AssertScalar.__init__, getattr(GraphLowering, MAKING)
    reading: list[Node] = []

    def create_asserts(self: Any, node: Node, *args: Any) -> Any:
        reading[:] = [node]
        return making(self, node, *args)

    def named(self: Any, scalar: Any, msg: str) -> None:
        plain(self, scalar, lines.get(_form(scalar)) or _bound(reading, msg))

    with patch.object(GraphLowering, MAKING, create_asserts), patch.object(ir.AssertScalar, "__init__", named):
        yield


def _assertions(program: ExportedProgram) -> dict[str, str]:
    """Returns the message of every assertion of the model about a number, by its condition.  The message names all lines with that
    condition."""
    nodes_by_form: dict[str, list[Node]] = {}
    for module in program.graph_module.modules():
        nodes = module.graph.nodes if isinstance(module, GraphModule) else ()
        for node in [node for node in nodes if node.target is torch.ops.aten._assert_scalar.default]:
            condition = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
            if isinstance(condition, torch.SymBool) and place(node)[0]:
                nodes_by_form.setdefault(_form(condition.node.expr), []).append(node)
    return {form: asserted(nodes) for form, nodes in nodes_by_form.items()}


def _bound(reading: Sequence[Node], message: str) -> str:
    """Returns the message for a bound that Inductor derived from several assertions, with the line that reads the number."""
    named = [node for node in reading if place(node)[0]]
    return asserted(named, f"{re.sub(NAME, 'a number', message)} in {place(named[0])[1]}") if named else message


NAME = r"\bu\d+\b"
"""Inductor's names of numbers that are read from tensors."""


def _form(condition: Any) -> str:
    """Returns a condition without the names of its numbers, because Inductor's names differ from those of export."""
    return re.sub(r"[a-z]+\d+", "_", str(canonicalize_bool_expr(condition)))
