"""Converts conditions of Python to tensors: `if`, `torch.equal`, and comparisons of numbers that were read from tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

EQUAL = frozenset({torch.equal, torch.Tensor.equal})
CLOSE = frozenset({torch.allclose, torch.Tensor.allclose})


def differ_in_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors surely differ in shape: in rank or in constant sizes."""
    pairs = zip(one.shape, other.shape, strict=False)
    return one.dim() != other.dim() or any(type(left) is type(right) is int and left != right for left, right in pairs)


def predicate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the condition that Python tests, as a tensor without dimensions, or None if this is not supported."""
    if func in EQUAL:
        one, other = args
        return (one == other).all() if one.shape == other.shape else None
    if func in CLOSE:
        return torch.isclose(*args, **kwargs).all()
    (tensor,) = args
    return tensor.reshape(()) != 0 if tensor.numel() == 1 else None


class Unknown(Exception):
    """An expression that cannot be converted to a tensor."""


def truth_of(expression: Any, symbols: Mapping[Any, Callable[[], torch.Tensor]]) -> torch.Tensor | None:
    """Converts a condition on numbers to a tensor, or returns None.  `symbols` has functions that return the tensor of a symbol."""
    try:
        value = _tensor(expression, symbols)
    except Unknown:
        return None
    if not isinstance(value, torch.Tensor):
        return None
    return value if value.dtype is torch.bool else value != 0


def number_of(expression: Any, symbols: Mapping[Any, Callable[[], torch.Tensor]]) -> torch.Tensor | None:
    """Converts a number to a tensor, or returns None.  The number is computed from numbers that Python read."""
    try:
        value = _tensor(expression, symbols)
    except Unknown:
        return None
    return value if isinstance(value, torch.Tensor) else None


BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Mul": operator.mul, "And": torch.logical_and, "Or": torch.logical_or, "Max": torch.maximum,
    "Min": torch.minimum, "StrictGreaterThan": operator.gt, "GreaterThan": operator.ge, "StrictLessThan": operator.lt,
    "LessThan": operator.le, "Equality": operator.eq, "Unequality": operator.ne, "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": lambda one, other: one / other, "FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Pow": operator.pow, "FloatPow": operator.pow, "PowByNatural": operator.pow,
}  # fmt: skip
"""Functions by the name of the class in sympy, or in torch.utils._sympy.functions."""

UNARY: Mapping[str, Callable[[Any], Any]] = {
    "Not": torch.logical_not,
    "Abs": abs,
    "TruncToInt": lambda value: value.trunc().long() if isinstance(value, torch.Tensor) else int(value),
    "ToFloat": lambda value: value.double() if isinstance(value, torch.Tensor) else float(value),
}


def _tensor(expression: Any, symbols: Mapping[Any, Callable[[], torch.Tensor]]) -> Any:
    if isinstance(expression, sympy.Symbol):
        if expression not in symbols:
            raise Unknown
        return symbols[expression]()
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Number):
        return float(expression)
    name = type(expression).__name__
    parts = [_tensor(part, symbols) for part in expression.args]
    if name in UNARY and len(parts) == 1:
        return UNARY[name](parts[0])
    if name not in BINARY or len(parts) < 2:
        raise Unknown
    if BINARY[name] in (torch.maximum, torch.minimum):
        like = next((part for part in parts if isinstance(part, torch.Tensor)), None)
        parts = [part if isinstance(part, torch.Tensor) or like is None else torch.full_like(like, part) for part in parts]
    return reduce(BINARY[name], parts)
