"""Replaces `int()`, `float()` and `math.isnan()` for numbers that one path reads from tensors, and `len()` of tensors with a
variable number of rows.

`int(tensor)` returns a plain number, whatever `tensor.__int__` returns, and so does `len(tensor)`.  So these names are replaced in
the model's modules while a path is traced, and while it runs again with forced answers.  The replacements keep numbers that depend
on data, and otherwise call the builtin.  A module that uses `int` or `float` for more than calls, `isinstance` and annotations
(`dtype=float`, `type(x) is int`) keeps the builtin.
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
"""Takes int or float and a value.  Returns the number to keep, or None to call the builtin."""

Ask = Callable[[Callable[[Any], bool], Any], bool | None]
"""Takes a function of ASKING and a value.  Returns the answer, or None to call the function."""

Measure = Callable[[Any], Any]
"""Takes a value.  Returns its length as a number to keep, or None to call `len`."""

ASKING = (math.isnan, math.isinf, math.isfinite)
"""Functions that test a number.  torch has functions with the same names."""

NAMES = (int, float)
_MISSING = object()


class _NumberReplacement(type):
    """The metaclass of a replacement of a builtin number type."""

    plain: type
    convert: Convert

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        number = cls.convert(cls.plain, args[0]) if len(args) == 1 and not kwargs else None
        return cls.plain(*args, **kwargs) if number is None else number

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


@contextmanager
def conversion_calls(model: torch.nn.Module, convert: Convert, ask: Ask, measure: Measure) -> Iterator[None]:
    """Replaces these functions in the modules of the model's packages inside this context."""
    replacements: dict[str, Any] = {
        kind.__name__: _NumberReplacement(kind.__name__, (), {"plain": kind, "convert": staticmethod(convert)}) for kind in NAMES
    }
    asking = {function.__name__: _asking(function, ask) for function in ASKING}
    measuring = _measuring(measure)
    before: list[tuple[dict[str, Any], str, Any]] = []

    def put(namespace: dict[str, Any], name: str, value: Any) -> None:
        before.append((namespace, name, namespace.get(name, _MISSING)))
        namespace[name] = value

    try:
        for namespace in _namespaces(model):
            for name in _replaceable_names(namespace.get("__file__")) - namespace.keys():
                put(namespace, name, replacements[name])
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


def _replaceable_names(file: Any) -> frozenset[str]:
    """Returns the names in NAMES that a source file calls, and otherwise uses only in `isinstance` and annotations.  Returns none
    for a file that cannot be read."""
    try:
        return _calls_of(file, os.stat(file).st_mtime_ns)
    except (OSError, TypeError, SyntaxError, ValueError):
        return frozenset()


@cache
def _calls_of(file: str, modified: int) -> frozenset[str]:
    """See `_replaceable_names`.  `modified` is the modification time of the file, a part of the cache key."""
    source = Path(file).read_bytes()
    names = {name.decode() for name in re.findall(rb"\b(int|float)\(", source)}
    if not names:
        return frozenset()  # most modules; parsing the other 38 modules of transformers takes 1 s per process
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
    """Returns the globals of the modules of all packages that define classes of the model, except torch."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"builtins", "torch", "abc", "typing"}
    namespaces = [vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]
    functions = [getattr(vars(kind).get(name), "__globals__", None) for kind in kinds for name in ("forward", "__init__")]
    namespaces += [names for names in functions if names is not None and not str(names.get("__name__", "")).startswith("torch.")]
    return list({id(names): names for names in namespaces}.values())
