"""Numbers that eager PyTorch reads out of tensors, whose comparisons get forced answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]

ARITHMETIC = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "neg", "pos", "abs",
)  # fmt: skip
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
CONVERTED = "converted"
"""The method of such a number that gives it as an int or a float."""

LOGIC = ("and", "rand", "or", "ror")


EXACT = frozenset({"add", "radd", "sub", "rsub", "mul", "rmul", "neg", "pos"})
"""Arithmetic that the expressions of sizes follow."""

EXPRESSION = "expression"
"""The attribute of a size with what a trace has for it, an expression of symbols; of another number it is None."""


def tracked(value: Any, ask: Callable[[bool], bool], expression: Any = None) -> Any:
    """`value`, a number, as one of the same value; what follows from it by arithmetic is such a number too, and `ask` answers
    whether it, or a comparison with it, is true.

    `expression`: what a trace has for this number, a size.  A comparison of two that differ by a constant is no question: torch
    knows the answer."""
    if type(value) is bool:
        return _truth(value, ask)
    if type(value) in (int, float):
        return _number(value, ask, expression)
    return value


def _number(value: Any, ask: Callable[[bool], bool], expression: Any = None) -> Any:
    base: Any = type(value)
    methods: dict[str, Any] = {
        "__hash__": base.__hash__,
        "__bool__": lambda self: ask(base.__bool__(self)),
        "ask": staticmethod(ask),
        EXPRESSION: expression,
        CONVERTED: lambda self, kind: tracked(kind(base(self)), ask),
    }
    for name in ARITHMETIC:
        if hasattr(base, f"__{name}__"):
            methods[f"__{name}__"] = _computed(getattr(base, f"__{name}__"), name, ask)
    for name in COMPARISONS:
        methods[f"__{name}__"] = _compared(getattr(base, f"__{name}__"), ask)
    return type(base.__name__, (base,), methods)(value)


def _computed(method: Callable[..., Any], name: str, ask: Callable[[bool], bool]) -> Callable[..., Any]:
    """Arithmetic, of expressions too where all of them are known."""

    def run(*values: Any) -> Any:
        result = method(*values)
        if result is NotImplemented:
            return result
        parts = [_expression(value) for value in values] if name in EXACT else [None]
        known = all(part is not None for part in parts)
        return tracked(result, ask, getattr(parts[0], f"__{name}__")(*parts[1:]) if known else None)

    return run


def _compared(method: Callable[..., Any], ask: Callable[[bool], bool]) -> Callable[..., Any]:
    """A comparison: a question, but where the expressions answer it."""

    def run(one: Any, other: Any) -> Any:
        result = method(one, other)
        left, right = _expression(one), _expression(other)
        if left is not None and right is not None and (left - right).is_number:
            return result
        return _truth(result, ask)

    return run


def _expression(value: Any) -> Any:
    """What a trace has for a number; None where that is not known."""
    if type(value) is int:
        return sympy.Integer(value)
    return getattr(value, EXPRESSION, None)


def converted(kind: type, value: Any) -> Any:
    """A number of this module's as an int or a float that is one, too; None for any other value."""
    method = getattr(value, CONVERTED, None) if isinstance(value, int | float) else None
    return None if method is None else method(kind)


def asked(natural: Callable[[Any], bool], value: Any) -> bool | None:
    """The answer to a question about a number of this module's, which has a `natural` one; None for any other value."""
    ask = getattr(value, "ask", None) if isinstance(value, int | float) else None
    return None if ask is None else ask(natural(value))


def _truth(value: Any, ask: Callable[[bool], bool]) -> Any:
    """A truth value, as an int: no class can be derived from `bool`."""
    if value is NotImplemented:
        return value
    methods: dict[str, Any] = {"__hash__": int.__hash__, "__bool__": lambda self: ask(int(self) != 0)}
    for name in LOGIC:
        methods[f"__{name}__"] = _wrapped(getattr(int, f"__{name}__"), lambda result: _truth(result, ask))
    for name in ("eq", "ne"):
        methods[f"__{name}__"] = _wrapped(getattr(int, f"__{name}__"), lambda result: _truth(result, ask))
    return type("bool", (int,), methods)(value)


def _wrapped(method: Callable[..., Any], wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        result = method(*values)
        return result if result is NotImplemented else wrap(result)

    return run
