"""`int()`, `float()` and `math.isnan()` of numbers that one way through a model's Python reads out of tensors; `len()` of rows.

`int(tensor)` gives a plain number, whatever `tensor.__int__` returns, and so does `len(tensor)`.  So while a way is traced, or gone
again with forced answers, these names of the model's modules stand for others.  They keep a number that depends on data, and do
with anything else what they always do.  A module that uses `int` or `float` for more than calls, `isinstance` and annotations
(`dtype=float`, `type(x) is int`) keeps the builtin one.
"""

from __future__ import annotations

import ast
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

Convert = Callable[[type, Any], Any]
"""Given int or float and a value: the number to keep, None for what the builtin type shall convert."""

Ask = Callable[[Callable[[Any], bool], Any], bool | None]
"""Given one of ASKING and a value: the answer, None for what the function shall answer."""

Measure = Callable[[Any], Any]
"""Given a value: its length as a number to keep, None for what `len` shall measure."""

ASKING = (math.isnan, math.isinf, math.isfinite)
"""Functions that ask a number, which torch has by the same names."""

NAMES = (int, float)
_MISSING = object()


class _Stand(type):
    """The type of what stands for a builtin number type."""

    plain: type
    convert: Convert

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kept = cls.convert(cls.plain, args[0]) if len(args) == 1 and not kwargs else None
        return cls.plain(*args, **kwargs) if kept is None else kept

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


@contextmanager
def conversion_calls(model: torch.nn.Module, convert: Convert, ask: Ask, measure: Measure) -> Iterator[None]:
    """Meanwhile `convert`, `ask` and `measure` are asked where the modules of the model's packages call these functions."""
    stands: dict[str, Any] = {
        kind.__name__: _Stand(kind.__name__, (), {"plain": kind, "convert": staticmethod(convert)}) for kind in NAMES
    }
    asking = {function.__name__: _asking(function, ask) for function in ASKING}
    measuring = _measuring(measure)
    before: list[tuple[dict[str, Any], str, Any]] = []

    def put(namespace: dict[str, Any], name: str, value: Any) -> None:
        before.append((namespace, name, namespace.get(name, _MISSING)))
        namespace[name] = value

    try:
        for namespace in _namespaces(model):
            for name in _called_alone(namespace.get("__file__")) - namespace.keys():
                put(namespace, name, stands[name])
            if "len" not in namespace:
                put(namespace, "len", measuring)
            for plain in ASKING:
                if namespace.get(plain.__name__) is plain:
                    put(namespace, plain.__name__, asking[plain.__name__])
        for name, function in asking.items():
            put(vars(math), name, function)
        yield
    finally:
        for namespace, name, value in reversed(before):
            if value is _MISSING:
                del namespace[name]
            else:
                namespace[name] = value


def _asking(plain: Callable[[Any], bool], ask: Ask) -> Callable[[Any], bool]:
    def function(value: Any) -> bool:
        answer = ask(plain, value)
        return plain(value) if answer is None else answer

    return function


def _measuring(measure: Measure) -> Callable[[Any], Any]:
    def function(value: Any, /) -> Any:
        length = measure(value)
        return len(value) if length is None else length

    return function


def _called_alone(file: Any) -> frozenset[str]:
    """Those of NAMES that a source file calls, and uses for nothing else but `isinstance` and annotations; none of a file that
    cannot be read."""
    try:
        return _calls_of(file, os.stat(file).st_mtime_ns)
    except (OSError, TypeError, SyntaxError, ValueError):
        return frozenset()


@cache
def _calls_of(file: str, changed: int) -> frozenset[str]:
    """`changed`: when the file was, as the result holds for its text of that time."""
    source = Path(file).read_bytes()
    names = {name.decode() for name in re.findall(rb"\b(int|float)\(", source)}
    if not names:
        return frozenset()  # most modules: the trees of the other 38 of transformers take a second, once a process
    nodes = list(ast.walk(ast.parse(source)))
    allowed: set[int] = set()
    for node in nodes:
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.Call):
            typed = isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            parts += [node.func, *(node.args[1:] if typed else ())]
        allowed |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return frozenset(names - {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in allowed})


def _namespaces(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The global names of the modules of all packages that the model's classes come from, but for torch."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"builtins", "torch", "abc", "typing"}
    namespaces = [vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]
    functions = [getattr(vars(kind).get(name), "__globals__", None) for kind in kinds for name in ("forward", "__init__")]
    namespaces += [names for names in functions if names is not None and not str(names.get("__name__", "")).startswith("torch.")]
    return list({id(names): names for names in namespaces}.values())
