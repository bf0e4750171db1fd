"""Code for every size: what torch decides by the sizes of the example holds for the others, too, or nothing is compiled.

While Inductor lowers a program, the symbols of its sizes are frozen: where torch needs to know whether `batch >= 16`, the example
answers, and no guard is kept.  But the answer narrows the symbol's range.  With sizes 1 and 16, the range 1 to 16 becomes 16 alone,
and the code writes 16 rows whatever the call has (torch 2.11 and 2.13: a 3 x 3 convolution).  So answers narrow nothing here.  The
one for convolutions, by which an implementation is chosen, decides the layout of memory alone, and is taken of the example's sizes.
Any other answer has to be that of the smallest and of the largest sizes.

Private interfaces (torch 2.11, 2.13): `ShapeEnv._check_frozen` and `ShapeEnv._maybe_guard_rel`, `torch._C._select_conv_backend`,
and the sympy expression of a SymInt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...errors import BuildError

METHODS = ((ShapeEnv, "_check_frozen"), (ShapeEnv, "_maybe_guard_rel"), (torch._C, "_select_conv_backend"))


@contextmanager
def decided_alike(program: ExportedProgram) -> Iterator[None]:
    """While it lasts, code is generated for all sizes of `program`.  Raises size-decides at its end when torch decided something by
    the example's sizes that the smallest or largest ones decide otherwise, and torch-unsupported."""
    for owner, name in METHODS:
        if not hasattr(owner, name):
            raise BuildError(
                "torch-unsupported", f"torch {torch.__version__} has no {name}; cgcompile was tested with 2.11 and 2.13"
            )
    limits = _limits(program)
    taken: dict[Any, Any] = {}
    note, narrow = ShapeEnv._check_frozen, ShapeEnv._maybe_guard_rel

    def noted(self: Any, expr: Any, value: Any) -> None:
        if self.frozen and _known(expr, limits):
            taken.setdefault(expr, value)
        note(self, expr, value)

    def narrowed(self: Any, expr: Any) -> None:
        if not (self.frozen and _known(expr, limits)):
            narrow(self, expr)

    with (
        patch.object(*METHODS[0], noted),
        patch.object(*METHODS[1], narrowed),
        patch.object(*METHODS[2], _of_example(torch._C._select_conv_backend)),
    ):
        yield
    for expr, value in taken.items():
        if (other := _otherwise(expr, value, limits)) is not None:
            raise BuildError("size-decides", f"torch compiles other code at {other} than at the largest: {expr} is {value} there")


def _limits(program: ExportedProgram) -> dict[Any, tuple[int, int]]:
    """The smallest and the largest size of each symbol that the inputs decide."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape if isinstance(size, torch.SymInt)]
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols} & program.range_constraints.keys()
    ranges = {symbol: program.range_constraints[symbol] for symbol in symbols}
    return {symbol: (int(each.lower), int(each.upper)) for symbol, each in ranges.items() if isinstance(each.upper, sympy.Integer)}


def _known(expr: Any, limits: Mapping[Any, tuple[int, int]]) -> bool:
    symbols = getattr(expr, "free_symbols", None)
    return symbols is not None and bool(symbols) and symbols <= limits.keys()


def _otherwise(expr: Any, value: Any, limits: Mapping[Any, tuple[int, int]]) -> str | None:
    """The corner of the ranges where `expr` is not `value`, as text."""
    symbols = sorted(expr.free_symbols, key=str)
    for corner in product(*[limits[symbol] for symbol in symbols]):
        if sympy.sympify(expr.subs(dict(zip(symbols, corner, strict=True)))) != value:
            return ", ".join(f"{symbol}={size}" for symbol, size in zip(symbols, corner, strict=True))
    return None


def _of_example(select: Callable[..., Any]) -> Callable[..., Any]:
    """`select`, asked with the sizes of the example in the place of symbols."""

    def selected(*args: Any, **kwargs: Any) -> Any:
        return select(*[_plain(each) for each in args], **{name: _plain(each) for name, each in kwargs.items()})

    return selected


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = [_number(size) for size in value.shape], [_number(stride) for stride in value.stride()]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _number(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
