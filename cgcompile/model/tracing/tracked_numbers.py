"""Numbers that Python reads from tensors in eager PyTorch, and whose comparisons get forced answers."""

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
"""The name of the method that converts a tracked number to an int or a float."""

LOGIC = ("and", "rand", "or", "ror")


EXACT = frozenset({"add", "radd", "sub", "rsub", "mul", "rmul", "neg", "pos"})
"""Arithmetic that expressions of sizes support."""

EXPRESSION = "expression"
"""The attribute of a size that holds its symbolic expression in the trace.  It is None for any other number."""


def tracked(value: Any, ask: Callable[[bool], bool], expression: Any = None) -> Any:
    """Returns a number with the value of `value`.  `ask` gives the truth value of it, or of a comparison with it.  Arithmetic with
    it returns such numbers too.  `expression` is the symbolic expression of a size.  A comparison of two expressions with a
    constant difference needs no answer, because torch knows it."""
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
    """Wraps an arithmetic method.  The result has an expression if all operands have one."""

    def run(*values: Any) -> Any:
        result = method(*values)
        if result is NotImplemented:
            return result
        parts = [_expression(value) for value in values] if name in EXACT else [None]
        has_expression = all(part is not None for part in parts)
        return tracked(result, ask, getattr(parts[0], f"__{name}__")(*parts[1:]) if has_expression else None)

    return run


def _compared(method: Callable[..., Any], ask: Callable[[bool], bool]) -> Callable[..., Any]:
    """Wraps a comparison.  `ask` answers it, unless the expressions do."""

    def run(one: Any, other: Any) -> Any:
        result = method(one, other)
        left, right = _expression(one), _expression(other)
        if left is not None and right is not None and (left - right).is_number:
            return result
        return _truth(result, ask)

    return run


def _expression(value: Any) -> Any:
    if type(value) is int:
        return sympy.Integer(value)
    return getattr(value, EXPRESSION, None)


def converted(kind: type, value: Any) -> Any:
    """Converts a tracked number to a tracked int or float.  Returns None for any other value."""
    method = getattr(value, CONVERTED, None) if isinstance(value, int | float) else None
    return None if method is None else method(kind)


def asked(natural: Callable[[Any], bool], value: Any) -> bool | None:
    """Returns the forced answer for `natural(value)` of a tracked number, or None for any other value."""
    ask = getattr(value, "ask", None) if isinstance(value, int | float) else None
    return None if ask is None else ask(natural(value))


def _truth(value: Any, ask: Callable[[bool], bool]) -> Any:
    """Returns a tracked truth value as an int, because `bool` has no subclasses."""
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
