"""Nested inputs and outputs as data: no class of the model is needed, and none is imported, to take a call apart or build a result.

A tree is one of {"tensor": position}, {"value": None | bool | int | float | str}, {"tuple": [trees]}, {"list": [trees]},
{"dict": [[key, tree], ...]} (keys str or int, order kept) and {"namedtuple": [name, [field, ...], [trees]]}.  The tree of a call is
{"call": [[parameter, tree], ...]}.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from .errors import InputStructure, ManifestInvalid
from .schema import Tree


def check(tree: Tree, where: str, tensors: int) -> None:
    """Raises ManifestInvalid unless `tree` is well formed and names tensors 0..tensors-1, each once and in order."""
    found: list[int] = []
    _check(tree, where, found)
    if found != list(range(tensors)):
        raise ManifestInvalid(f"{where}: names tensors {found[:8]}, expected each of {tensors} once, in order")


def _check(tree: Any, where: str, found: list[int]) -> None:
    if type(tree) is not dict or len(tree) != 1:
        raise ManifestInvalid(f"{where}: expected an object with one key")
    ((kind, body),) = tree.items()
    children: list[tuple[str, Any]] = []
    if kind == "tensor" and type(body) is int:
        found.append(body)
    elif kind == "value" and (body is None or type(body) in (bool, int, float, str)):
        pass
    elif kind in ("tuple", "list") and type(body) is list:
        children = [(f"{where}[{index}]", child) for index, child in enumerate(body)]
    elif kind in ("dict", "call") and type(body) is list and all(type(pair) is list and len(pair) == 2 for pair in body):
        if not all(type(key) is str or (kind == "dict" and type(key) is int) for key, _ in body):
            raise ManifestInvalid(f"{where}: a key is neither text nor a number")
        children = [(f"{where}.{key}", child) for key, child in body]
    elif kind == "namedtuple" and type(body) is list and len(body) == 3 and _fields_fit(body):
        children = [(f"{where}.{key}", child) for key, child in zip(body[1], body[2], strict=True)]
    else:
        raise ManifestInvalid(f"{where}: {str(kind)[:40]!r} is no structure of this format")
    for place, child in children:
        _check(child, place, found)


def _fields_fit(body: list[Any]) -> bool:
    name, names, children = body
    return (
        type(names) is list
        and type(children) is list
        and len(names) == len(children)
        and len(set(map(str, names))) == len(names)
        and all(type(word) is str and word.isidentifier() and not iskeyword(word) for word in [name, *names])
        and not any(word.startswith("_") for word in names)
    )


# --- taking a call apart --------------------------------------------------------------------------------------------


def flattener(call: Tree) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[Any]]:
    """A function (args, kwargs) -> tensors in the signature's order.

    Parameters may be given by position or by name.  Raises InputStructure where the nesting, a key, or a constant differs.
    """
    parameters: list[tuple[str, Tree]] = [(name, tree) for name, tree in call["call"]]
    count = len(parameters)
    plain = all("tensor" in tree for _, tree in parameters)

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        if plain and not kwargs and len(args) == count:
            return args
        tensors: list[Any] = []
        for (name, tree), value in zip(parameters, _bind(parameters, args, kwargs), strict=True):
            _flatten(tree, value, name, tensors)
        return tensors

    return flatten


def _bind(parameters: list[tuple[str, Tree]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    if len(args) > len(parameters):
        raise InputStructure(f"expected {len(parameters)} inputs ({_names(parameters)}), got {len(args)}")
    values = list(args)
    given = {name for name, _ in parameters[: len(args)]}
    for name, tree in parameters[len(args) :]:
        if name in kwargs:
            values.append(kwargs[name])
        elif "value" in tree:
            values.append(tree["value"])
        else:
            raise InputStructure(f"input {name!r} is missing: the bundle takes {_names(parameters)}")
    for name in kwargs:
        if name in given:
            raise InputStructure(f"input {name!r} is given by position and by name")
        if name not in {parameter for parameter, _ in parameters}:
            raise InputStructure(f"no input is called {name!r}: the bundle takes {_names(parameters)}")
    return values


def _names(parameters: list[tuple[str, Tree]]) -> str:
    return ", ".join(name for name, _ in parameters)


def _flatten(tree: Tree, value: Any, where: str, tensors: list[Any]) -> None:
    ((kind, body),) = tree.items()
    if kind == "tensor":
        tensors.append(value)
    elif kind == "value":
        if type(value) is not type(body) or value != body:
            raise InputStructure(f"input {where!r}: the bundle was built for the constant {body!r}, got {_brief(value)}")
    elif kind == "dict":
        keys = [key for key, _ in body]
        if not isinstance(value, Mapping) or set(value) != set(keys):
            raise InputStructure(f"input {where!r}: expected a dict with the keys {keys}, got {_brief(value)}")
        for key, child in body:
            _flatten(child, value[key], f"{where}.{key}", tensors)
    else:
        children = body[2] if kind == "namedtuple" else body
        sort: type = list if kind == "list" else tuple
        if not isinstance(value, sort) or len(value) != len(children):
            raise InputStructure(f"input {where!r}: expected a {kind} of {len(children)}, got {_brief(value)}")
        for index, (child, item) in enumerate(zip(children, value, strict=True)):
            _flatten(child, item, f"{where}.{index}", tensors)


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)[:8]}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


# --- building a result ----------------------------------------------------------------------------------------------


def builder(tree: Tree) -> Callable[[Sequence[Any]], Any]:
    """A function tensors -> the nested result.  Named tuples are made once, from their names alone."""
    ((kind, body),) = tree.items()
    if kind == "tensor":
        position: int = body
        return lambda tensors: tensors[position]
    if kind == "value":
        return lambda tensors: body
    if kind == "dict":
        keys = [key for key, _ in body]
        parts = [builder(child) for _, child in body]
        return lambda tensors: {key: part(tensors) for key, part in zip(keys, parts, strict=True)}
    if kind == "namedtuple":
        made: Callable[..., Any] = namedtuple(body[0], body[1])  # type: ignore[misc]
        parts = [builder(child) for child in body[2]]
        return lambda tensors: made(*[part(tensors) for part in parts])
    parts = [builder(child) for child in body]
    if kind == "list":
        return lambda tensors: [part(tensors) for part in parts]
    return lambda tensors: tuple([part(tensors) for part in parts])
