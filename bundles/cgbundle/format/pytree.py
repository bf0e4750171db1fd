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

from ..errors import CallError
from . import limits, scalars
from .scalars import invalid
from .schema import Tree


def check(tree: Tree, where: str, tensors: int) -> None:
    """Raises manifest-invalid unless `tree` is well formed and names tensors 0..tensors-1, each once and in order."""
    _check_all([(where, tree)], where, tensors)


def check_call(tree: Tree, tensors: int) -> None:
    """As `check`, for the tree of a call: its parameters, each named once."""
    parameters: Any = tree.get("call")
    if len(tree) != 1 or not _are_pairs(parameters) or not all(type(name) is str for name, _ in parameters):
        raise invalid("call", "is not the structure of a call")
    _check_keys(parameters, ("call",))
    _check_all([("call" + _step(name), child) for name, child in parameters], "call", tensors)


Place = tuple[Any, ...]
"""Where a tree stands: (the place of the tree around it, the key or index in that one); of the outermost, its path as text."""


def _check_all(trees: list[tuple[Any, Any]], where: str, tensors: int) -> None:
    """Without recursion, and with paths that are spelled where something is wrong alone: a tree may be hostile."""
    found: list[int] = []
    waiting: list[tuple[Place, Any, int]] = [((place,), tree, 0) for place, tree in reversed(trees)]
    while waiting:
        place, tree, depth = waiting.pop()
        waiting += [((place, key), child, depth + 1) for key, child in reversed(_children(tree, place, depth, found))]
    if found != list(range(tensors)):
        named = ", ".join(map(scalars.brief, found[:8]))
        raise invalid(where, f"names the tensors {named or 'none'}, expected each of {tensors} once, in order")


def _children(tree: Any, place: Place, depth: int, found: list[int]) -> list[tuple[Any, Any]]:
    """(key or index, tree) of what lies in a tree, which is sound in itself; the number of a tensor goes to `found`."""
    if depth > limits.TREE_DEPTH:
        raise invalid(_spell(place), "nested too deeply")
    if type(tree) is not dict or len(tree) != 1:
        raise invalid(_spell(place), "expected an object with one key")
    ((kind, body),) = tree.items()
    if kind == "tensor" and type(body) is int:
        found.append(body)
        return []
    if kind == "value" and (body is None or type(body) in (bool, int, float, str)):
        _check_value(body, place)
        return []
    if kind in ("tuple", "list") and type(body) is list:
        return list(enumerate(body))
    if kind == "dict" and _are_pairs(body):
        _check_keys(body, place)
        return [(key, child) for key, child in body]
    if kind == "namedtuple" and type(body) is list and len(body) == 3 and _fields_fit(body):
        return list(zip(body[1], body[2], strict=True))
    raise invalid(_spell(place), f"{str(kind)[:40]!r} is no structure of this format")


def _check_value(value: Any, place: Place) -> None:
    if type(value) is int and not -limits.INTEGER <= value < limits.INTEGER:
        raise scalars.expected(_spell(place), "an integer of 64 bits", value)
    if type(value) is str and (reason := scalars.text_reason(value)):
        raise invalid(_spell(place), reason)


def _are_pairs(body: Any) -> bool:
    return type(body) is list and all(type(pair) is list and len(pair) == 2 for pair in body)


def _check_keys(pairs: list[Any], place: Place) -> None:
    for key, _ in pairs:
        if type(key) is str:
            known = len(key) <= limits.NAME and key.isprintable()
        else:
            known = type(key) is int and -limits.INTEGER <= key < limits.INTEGER
        if not known:
            raise invalid(_spell(place), f"the key {scalars.brief(key)} is neither a printable name nor a number of 64 bits")
    if len({key for key, _ in pairs}) != len(pairs):
        raise invalid(_spell(place), "a key stands twice")


def _spell(place: Place) -> str:
    """The path of a place: `call.x[0].key`."""
    keys: list[Any] = []
    while len(place) == 2:
        place, key = place
        keys.append(key)
    return str(place[0]) + "".join([_step(key) for key in reversed(keys)])


def _step(key: str | int) -> str:
    if type(key) is str:
        return f".{key}" if key.isidentifier() and len(key) <= 40 else f"[{key[:40]!r}]"
    return f"[{key}]"


def _fields_fit(body: list[Any]) -> bool:
    name, names, children = body
    return (
        type(names) is list
        and type(children) is list
        and len(names) == len(children) <= limits.TREE_FIELDS
        and all(type(word) is str and _is_name(word) for word in [name, *names])
        and not any(word.startswith("_") for word in names)
        and len(set(names)) == len(names)
    )


def _is_name(word: str) -> bool:
    """A name as Python's parser leaves it: it takes some letters for others (NFKC)."""
    if len(word) > limits.NAME or not word.isidentifier() or iskeyword(word):
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
