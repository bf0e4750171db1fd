"""What a call of the model leaves behind in Python: attributes of its modules that are no buffers.

torch.export keeps nothing of these in the program: a counter stays where it was, a tensor kept for the next call is that of the
export.  Found by comparing before and after calls with the same inputs: what changes at the second, too, is no cache.
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
"""How far down and along containers and objects are looked into."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_OWN = ("_parameters", "_buffers", "_modules", "training")

Marks = dict[str, Any]
"""By `module.attribute`: something that is equal as long as the attribute is the same."""


def marks(model: torch.nn.Module, state: Set[int] = frozenset()) -> Marks:
    """Of every module's attributes that are no parameters, buffers or modules.  Tensors of an `id` in `state` may be written to."""
    return {name: _mark(value, DEEP, state) for name, value in own_attributes(model).items()}


class _Shell:
    """In place of an object whose attributes are looked at one by one."""

    __slots__ = ("ident",)

    def __init__(self, value: object) -> None:
        self.ident = id(value)


def own_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """The attributes of every module that are no parameters, buffers or modules, by `module.attribute`, and those of the objects
    among them, by `module.attribute.part`.  Modules that a list or a dict holds are modules, too: `module.attribute.0.part`."""
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
    """What a list, a tuple or a dict holds, by its index or its key.  A subclass may define these anew, or refuse them, and an
    object may refuse to say of what class it is."""
    kind = type(value)
    if issubclass(kind, list | tuple):
        return list(enumerate(list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)))[:WIDE]
    return list(dict.items(value))[:WIDE] if issubclass(kind, dict) else []


@contextmanager
def unregistered_attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """At the end the modules that lists and dicts hold, and objects, have the attributes that they had: torch.export puts back
    those of registered modules alone, and others keep what was traced."""
    registered = {id(vars(module)) for module in model.modules()}
    holders = [holder_of(model, name.rpartition(".")[0]) for name in own_attributes(model)]
    kept = {id(vars(holder)): vars(holder) for holder in holders if holder is not None}
    before = [(attributes, dict(attributes)) for ident, attributes in kept.items() if ident not in registered]
    try:
        yield
    finally:
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)


def _is_object(value: Any) -> bool:
    """Whether a value is an instance of a class that is written in Python, and neither a container, a tensor nor a function."""
    if not can_be_asked(value) or not hasattr(value, "__dict__") or callable(value):
        return False
    return bool(type(value).__flags__ & HEAP_TYPE) and not isinstance(value, (*_PLAIN, torch.Tensor, list, tuple, dict, set, type))


HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class whose methods can be replaced."""


def holder_of(model: torch.nn.Module, path: str) -> Any:
    """The module or object at `path`, None where it is gone."""
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
    """The attributes that are not what they were, or are new.  Of an object that is another one its parts are not named."""
    nothing = object()
    names = {name: None for name, mark in after.items() if before.get(name, nothing) != mark}
    return [name for name in names if name.rpartition(".")[0] not in names]


def same_nesting(one: Any, other: Any) -> bool:
    """Whether two marks of an attribute differ in nothing but which tensors it holds."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_nesting(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same_nesting(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def _mark(value: Any, deep: int, state: Set[int]) -> Any:
    if not can_be_asked(value):
        return id(value)
    if isinstance(value, _Shell):
        return value.ident
    if isinstance(value, torch.Tensor):
        return id(value), -1 if id(
            value
        ) in state else value._version  # by identity: who assigns an equal tensor assigns what an input may have made
    if isinstance(value, _PLAIN):
        return value
    if deep and isinstance(value, list | tuple):  # a subclass may define its length or its indices anew, or refuse them
        items = list(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value))
        return [type(value).__name__, len(items), [_mark(item, deep - 1, state) for item in items[:WIDE]]]
    if deep and isinstance(value, dict):
        entries = list(dict.items(value))
        return [len(entries), {str(key): _mark(item, deep - 1, state) for key, item in entries[:WIDE]}]
    if deep and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type) and not callable(value):
        return [id(value), {key: _mark(item, deep - 1, state) for key, item in list(vars(value).items())[:WIDE]}]
    return id(value)


def assignment_place(model: torch.nn.Module, name: str) -> tuple[str, str]:
    """(file:line, source line) of the first assignment to an attribute outside __init__, in the class of its module or in one that
    it is derived from, else of its forward(), else of the class; ("", "") without source."""
    path, _, leaf = name.rpartition(".")
    best, least = ("", ""), 0
    for kind in type(holder_of(model, path)).__mro__:
        if kind is object or kind.__module__.startswith("torch."):
            continue
        worth, place, line = _assignment_in(kind, leaf)
        if worth > least:
            best, least = (place, line), worth
    return best


def _assignment_in(kind: type, leaf: str) -> tuple[int, str, str]:
    """The place in the source of one class, and what it is: 3 for an assignment, 2 for forward(), 1 for the class, 0 for none."""
    try:
        file, (lines, first) = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return 0, "", ""
    inside, worth, at = "", 1, 0
    for number, line in enumerate(lines):
        if header := re.match(r"\s*def (\w+)", line):
            inside = header[1]
            if inside == "forward":
                worth, at = 2, number
        elif inside != "__init__" and re.search(rf"\.{re.escape(leaf)}\b\s*([-+*/|&@%]?=[^=]|\[|\.\w+\()", line):
            worth, at = 3, number
            break
    return worth, f"{shown(file)}:{first + at}", lines[at].strip()
