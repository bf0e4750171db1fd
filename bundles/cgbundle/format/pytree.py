"""Nested inputs and outputs as data: no class of the model is needed, and none is imported, to take a call apart or build a result.

A tree is an object with one key:

    {"tensor": position}            {"tuple": [trees]}    {"dict": [[key, tree], ...]}, keys str or int, order kept
    {"value": None, a number, ...}  {"list": [trees]}     {"namedtuple": [name, [field, ...], [trees]]}

The tree of a call is {"call": [[parameter, tree], ...]}.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from ..errors import BundleError, CallError
from .schema import Tree

MAX_DEPTH = 64
"""Containers inside each other; no model comes near."""


def check(tree: Tree, where: str, tensors: int) -> None:
    """Raises manifest-invalid unless `tree` is well formed and names tensors 0..tensors-1, each once and in order."""
    _check_all([(where, tree)], where, tensors)


def check_call(tree: Tree, tensors: int) -> None:
    """As `check`, for the tree of a call: its parameters, each named once."""
    parameters: Any = tree.get("call")
    if len(tree) != 1 or not _are_pairs(parameters) or not all(type(name) is str for name, _ in parameters):
        raise BundleError("manifest-invalid", "call: is not the structure of a call")
    _check_keys(parameters, "call")
    _check_all([(_path("call", name), child) for name, child in parameters], "call", tensors)


def _check_all(trees: list[tuple[str, Any]], where: str, tensors: int) -> None:
    found: list[int] = []
    for place, tree in trees:
        _check(tree, place, found, 0)
    if found != list(range(tensors)):
        raise BundleError("manifest-invalid", f"{where}: names tensors {found[:8]}, expected each of {tensors} once, in order")


def _check(tree: Any, where: str, found: list[int], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise BundleError("manifest-invalid", f"{where[:80]}: nested too deeply")
    if type(tree) is not dict or len(tree) != 1:
        raise BundleError("manifest-invalid", f"{where}: expected an object with one key")
    ((kind, body),) = tree.items()
    children: list[tuple[str, Any]] = []
    if kind == "tensor" and type(body) is int:
        found.append(body)
    elif kind == "value" and (body is None or type(body) in (bool, int, float, str)):
        pass
    elif kind in ("tuple", "list") and type(body) is list:
        children = [(f"{where}[{index}]", child) for index, child in enumerate(body)]
    elif kind == "dict" and _are_pairs(body):
        if not all(type(key) in (str, int) for key, _ in body):
            raise BundleError("manifest-invalid", f"{where}: a key is neither text nor a number")
        _check_keys(body, where)
        children = [(_path(where, key), child) for key, child in body]
    elif kind == "namedtuple" and type(body) is list and len(body) == 3 and _fields_fit(body):
        children = [(_path(where, key), child) for key, child in zip(body[1], body[2], strict=True)]
    else:
        raise BundleError("manifest-invalid", f"{where}: {str(kind)[:40]!r} is no structure of this format")
    for place, child in children:
        _check(child, place, found, depth + 1)


def _are_pairs(body: Any) -> bool:
    return type(body) is list and all(type(pair) is list and len(pair) == 2 for pair in body)


def _check_keys(pairs: list[Any], where: str) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise BundleError("manifest-invalid", f"{where}: a key stands twice")


def _path(where: str, key: str | int) -> str:
    return f"{where}.{key}" if type(key) is int or str(key).isidentifier() else f"{where}[{str(key)[:40]!r}]"


def _fields_fit(body: list[Any]) -> bool:
    name, names, children = body
    return (
        type(names) is list
        and type(children) is list
        and len(names) == len(children)
        and len(set(map(str, names))) == len(names)
        and all(type(word) is str and _is_name(word) for word in [name, *names])
        and not any(word.startswith("_") for word in names)
    )


def _is_name(word: str) -> bool:
    """A name as Python's parser leaves it: it takes some letters for others (NFKC)."""
    if not word.isidentifier() or iskeyword(word):
        return False
    if word.isascii():
        return True
    from unicodedata import normalize

    return normalize("NFKC", word) == word


# --- taking a call apart --------------------------------------------------------------------------------------------


def flattener(call: Tree) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[Any]]:
    """A function (args, kwargs) -> tensors in the signature's order.

    Parameters may be given by position or by name.  Raises input-structure where the nesting, a key, or a constant differs.
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
        raise CallError("input-structure", f"expected at most {len(parameters)} inputs ({_names(parameters)}), got {len(args)}")
    values = list(args)
    given = {name for name, _ in parameters[: len(args)]}
    for name, tree in parameters[len(args) :]:
        if name in kwargs:
            values.append(kwargs[name])
        elif "value" in tree:
            values.append(tree["value"])
        else:
            raise CallError("input-structure", f"input {name!r} is missing: the bundle takes {_names(parameters)}")
    for name in kwargs:
        if name in given:
            raise CallError("input-structure", f"input {name!r} is given by position and by name")
        if name not in {parameter for parameter, _ in parameters}:
            raise CallError("input-structure", f"no input is called {name!r}: the bundle takes {_names(parameters)}")
    return values


def _names(parameters: list[tuple[str, Tree]]) -> str:
    return ", ".join(name for name, tree in parameters if "value" not in tree)


def _flatten(tree: Tree, value: Any, where: str, tensors: list[Any]) -> None:
    ((kind, body),) = tree.items()
    if kind == "tensor":
        tensors.append(value)
    elif kind == "value":
        if type(value) is not type(body) or value != body:
            raise CallError(
                "input-structure", f"input {where!r}: the bundle was built for the constant {body!r}, got {_brief(value)}"
            )
    elif kind == "dict":
        keys = [key for key, _ in body]
        if not isinstance(value, Mapping) or set(value) != set(keys):
            raise CallError("input-structure", f"input {where!r}: expected a dict with the keys {keys}, got {_brief(value)}")
        for key, child in body:
            _flatten(child, value[key], f"{where}.{key}", tensors)
    else:
        children: list[Tree] = body[2] if kind == "namedtuple" else body
        sort: type[list[Any]] | type[tuple[Any, ...]] = list if kind == "list" else tuple
        if not isinstance(value, sort) or len(value) != len(children):
            raise CallError("input-structure", f"input {where!r}: expected a {kind} of {len(children)}, got {_brief(value)}")
        for index, (child, item) in enumerate(zip(children, value, strict=True)):
            _flatten(child, item, f"{where}.{index}", tensors)


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)[:8]}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value if not isinstance(value, str) or len(value) <= 40 else f"{value[:40]}...")
    return f"a {type(value).__name__}"


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
