"""Numbers that eager PyTorch reads out of tensors, whose comparisons get forced answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ARITHMETIC = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "neg", "pos", "abs",
)  # fmt: skip
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
CONVERTED = "converted"
"""The method of such a number that gives it as an int or a float."""

LOGIC = ("and", "rand", "or", "ror")


def tracked(value: Any, ask: Callable[[bool], bool]) -> Any:
    """`value`, a number, as one of the same value; what follows from it by arithmetic is such a number too, and `ask` answers
    whether it, or a comparison with it, is true."""
    if type(value) is bool:
        return _truth(value, ask)
    if type(value) in (int, float):
        return _number(value, ask)
    return value


def _number(value: Any, ask: Callable[[bool], bool]) -> Any:
    base: Any = type(value)
    methods: dict[str, Any] = {
        "__hash__": base.__hash__,
        "__bool__": lambda self: ask(base.__bool__(self)),
        "ask": staticmethod(ask),
    }
    methods[CONVERTED] = lambda self, kind: tracked(kind(base(self)), ask)
    for name in ARITHMETIC:
        if hasattr(base, f"__{name}__"):
            methods[f"__{name}__"] = _wrapped(getattr(base, f"__{name}__"), lambda result: tracked(result, ask))
    for name in COMPARISONS:
        methods[f"__{name}__"] = _wrapped(getattr(base, f"__{name}__"), lambda result: _truth(result, ask))
    return type(base.__name__, (base,), methods)(value)


def converted(kind: type, value: Any) -> Any:
    """A number of this module's as an int or a float that is one, too; None for any other value."""
    method = getattr(value, CONVERTED, None) if isinstance(value, int | float) else None
    return None if method is None else method(kind)


def asked(natural: Callable[[Any], bool], value: Any) -> bool | None:
    """The answer to a question about a number of this module's, which has a `natural` one; None for any other value."""
    return value.ask(natural(value)) if converted(float, value) is not None else None


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
