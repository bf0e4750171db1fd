"""Attributes of modules, other than buffers, that a call of the model changes.

A program of torch.export does not change them: a counter stays the same, and a tensor that is kept for the next call is that of the
export.  The attributes are compared before and after calls with the same inputs.  An attribute that the second call changes too is
not a cache.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch

from ..user_code import can_be_asked, shown

ATTRIBUTE_FIX = "register it as a buffer and write to that, or leave it out of forward()"

DEEP, WIDE = 3, 256
"""Maximum depth and number of elements of the search in containers and objects."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_OWN = ("_parameters", "_buffers", "_modules", "training")

Marks = dict[str, Any]
"""Marks by `module.attribute`.  Two marks of an attribute are equal if the attribute did not change."""


def marks(model: torch.nn.Module, state: Set[int] = frozenset()) -> Marks:
    """Returns marks of the attributes of modules.  A write to a tensor whose `id` is in `state` changes no mark."""
    return {name: _mark(value, DEEP, state) for name, value in own_attributes(model).items()}


class _Shell:
    """A placeholder for an object whose attributes have their own marks."""

    __slots__ = ("ident",)

    def __init__(self, value: object) -> None:
        self.ident = id(value)


def own_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes of modules that are not parameters, buffers or modules, by `module.attribute`.  The name of an
    object's attribute is `module.attribute.part`.  For a module in a list or dict it is `module.attribute.0.part`."""
    members: dict[str, Any] = {}
    modules = dict(model.named_modules())
    seen = {id(module) for module in modules.values()}
    while modules:
        unregistered: dict[str, torch.nn.Module] = {}
        for prefix, module in modules.items():
            for leaf, value in vars(module).items():
                if leaf in _OWN or leaf.endswith("_hooks"):
                    continue
                name = f"{prefix}.{leaf}" if prefix else leaf
                if _is_object(value):
                    members[name] = _Shell(value)
                    members |= {f"{name}.{part}": item for part, item in list(vars(value).items())[:WIDE] if isinstance(part, str)}
                else:
                    members[name] = value
                    unregistered |= {
                        f"{name}.{key}": child for key, child in _items(value) if issubclass(type(child), torch.nn.Module)
                    }
        modules = {}
        for name, outer in unregistered.items():
            for path, module in outer.named_modules(prefix=name):
                if id(module) not in seen:
                    modules[path] = module
                    seen.add(id(module))
    return members


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Returns the items of a list, a tuple or a dict, by index or key.  Uses methods of the builtin class, because a subclass may
    override them, or raise."""
    kind = type(value)
    if issubclass(kind, list | tuple):
        return list(enumerate(list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)))[:WIDE]
    return list(dict.items(value))[:WIDE] if issubclass(kind, dict) else []


@contextmanager
def unregistered_attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restores the attributes of objects, and of modules in lists and dicts, at the end.  torch.export restores only those of
    registered modules."""
    registered = {id(vars(module)) for module in model.modules()}
    holders = [holder_of(model, name.rpartition(".")[0]) for name in own_attributes(model)]
    by_id = {id(vars(holder)): vars(holder) for holder in holders if holder is not None}
    before = [(attributes, dict(attributes)) for ident, attributes in by_id.items() if ident not in registered]
    try:
        yield
    finally:
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)


def _is_object(value: Any) -> bool:
    """Returns whether a value is an instance of a Python class, but not a container, a tensor or a function."""
    if not can_be_asked(value) or not hasattr(value, "__dict__") or callable(value):
        return False
    return bool(type(value).__flags__ & HEAP_TYPE) and not isinstance(value, (*_PLAIN, torch.Tensor, list, tuple, dict, set, type))


HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the methods of such a class can be replaced."""


def holder_of(model: torch.nn.Module, path: str) -> Any:
    """Returns the module or object at `path`, or None if it does not exist."""
    value: Any = model
    for part in path.split(".") if path else ():
        if issubclass(type(value), list | tuple | dict):
            value = next((child for key, child in _items(value) if str(key) == part), None)
        else:
            value = getattr(value, part, None) if isinstance(value, torch.nn.Module) else vars(value).get(part)
        if value is None:
            break
    return value


def changed(before: Marks, after: Marks) -> list[str]:
    """Returns the attributes that are new or changed.  Omits the attributes of an object that was replaced."""
    nothing = object()
    names = {name: None for name, mark in after.items() if before.get(name, nothing) != mark}
    return [name for name in names if name.rpartition(".")[0] not in names]


def same_nesting(one: Any, other: Any) -> bool:
    """Returns whether two marks of an attribute differ only in their tensors."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_nesting(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same_nesting(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def _mark(value: Any, depth: int, state: Set[int]) -> Any:
    if not can_be_asked(value):
        return id(value)
    if isinstance(value, _Shell):
        return value.ident
    if isinstance(value, torch.Tensor):
        return id(value), -1 if id(value) in state else value._version  # by identity: an equal new tensor may depend on an input
    if isinstance(value, _PLAIN):
        return value
    if depth and isinstance(value, list | tuple):  # a subclass may override these methods, or raise
        items = list(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value))
        return [type(value).__name__, len(items), [_mark(item, depth - 1, state) for item in items[:WIDE]]]
    if depth and isinstance(value, dict):
        entries = list(dict.items(value))
        return [len(entries), {str(key): _mark(item, depth - 1, state) for key, item in entries[:WIDE]}]
    if depth and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type) and not callable(value):
        return [id(value), {key: _mark(item, depth - 1, state) for key, item in list(vars(value).items())[:WIDE]}]
    return id(value)


def assignment_place(model: torch.nn.Module, name: str) -> tuple[str, str]:
    """Returns (file:line, source line) of the first assignment to an attribute outside of __init__.  Searches the class of its
    module and its base classes.  Without an assignment, returns the place of forward(), else of the class, else ("", "")."""
    path, _, leaf = name.rpartition(".")
    best, best_rank = ("", ""), 0
    for kind in type(holder_of(model, path)).__mro__:
        if kind is object or kind.__module__.startswith("torch."):
            continue
        rank, place, line = _assignment_in(kind, leaf)
        if rank > best_rank:
            best, best_rank = (place, line), rank
    return best


def _assignment_in(kind: type, leaf: str) -> tuple[int, str, str]:
    """Returns a rank and the place in the source of one class: 3 an assignment, 2 forward(), 1 the class, 0 none."""
    try:
        file, (lines, first) = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return 0, "", ""
    function, rank, at = "", 1, 0
    for number, line in enumerate(lines):
        if header := re.match(r"\s*def (\w+)", line):
            function = header[1]
            if function == "forward":
                rank, at = 2, number
        elif function != "__init__" and re.search(rf"\.{re.escape(leaf)}\b\s*([-+*/|&@%]?=[^=]|\[|\.\w+\()", line):
            rank, at = 3, number
            break
    return rank, f"{shown(file)}:{first + at}", lines[at].strip()
