"""Nested inputs and outputs as data: no class of the model is needed, and none is imported, to take a call apart or build a result.

A tree is an object with one key:

    {"tensor": position}            {"tuple": [trees]}    {"dict": [[key, tree], ...]}, keys str or int, order kept
    {"value": None, a number, ...}  {"list": [trees]}     {"namedtuple": [name, [field, ...], [trees]]}
    {"record": [name, kind, [field, ...], [trees]]}

A record was an instance of a class that is neither of these: `kind` is "object" for one with attributes (a dataclass, a cache), or
"mapping" for one that is also a dict of its fields that are not None (outputs of Hugging Face's models).

The tree of a call is {"call": [[parameter, tree], ...]}; the manifest's `parameters` say of each whether it is given by name only,
and the model's default.  An argument that is no tensor is a constant: a call has to agree with what was recorded.
"""

from __future__ import annotations

from keyword import iskeyword
from typing import Any

from . import json_text, limits
from .json_text import invalid
from .schema import Tree

RECORDS = ("object", "mapping")  # kinds of a record


def check(tree: Tree, where: str, tensors: int) -> None:
    """Raises manifest-invalid unless `tree` is well formed and names tensors 0..tensors-1 once each, in order."""
    _check_all([(where, tree)], where, tensors)


def check_call(tree: Tree, tensors: int) -> None:
    """As `check`, for the tree of a call, whose parameters have distinct names."""
    parameters: Any = tree.get("call")
    if len(tree) != 1 or not _are_pairs(parameters) or not all(type(name) is str for name, _ in parameters):
        raise invalid("call", "is not the structure of a call")
    _check_keys(parameters, ("call",))
    _check_all([("call" + _step(name), child) for name, child in parameters], "call", tensors)


Place = tuple[Any, ...]
"""The position of a tree: (position of the parent, key or index); for the root (its path,)."""


def _check_all(trees: list[tuple[Any, Any]], where: str, tensors: int) -> None:
    """Walks without recursion, and formats paths only for errors: a tree may be hostile."""
    indices: list[int] = []
    waiting: list[tuple[Place, Any, int]] = [((place,), tree, 0) for place, tree in reversed(trees)]
    while waiting:
        place, tree, depth = waiting.pop()
        waiting += [((place, key), child, depth + 1) for key, child in reversed(_children(tree, place, depth, indices))]
    if indices != list(range(tensors)):
        named = ", ".join(map(json_text.brief, indices[:8]))
        raise invalid(where, f"names the tensors {named or 'none'}, expected each of {tensors} once, in order")


def _children(tree: Any, place: Place, depth: int, indices: list[int]) -> list[tuple[Any, Any]]:
    """Checks one tree without its children, and returns these as (key or index, tree). Appends a tensor's number to `indices`."""
    if depth > limits.TREE_DEPTH:
        raise invalid(_spell(place), "nested too deeply")
    if type(tree) is not dict or len(tree) != 1:
        raise invalid(_spell(place), "expected an object with one key")
    ((kind, body),) = tree.items()
    if kind == "tensor" and type(body) is int:
        indices.append(body)
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
    if kind == "record" and type(body) is list and len(body) == 4 and _record_fits(body):
        return list(zip(body[2], body[3], strict=True))
    raise invalid(_spell(place), f"{str(kind)[:40]!r} is no structure of this format")


def _check_value(value: Any, place: Place) -> None:
    if type(value) is int and not -limits.INTEGER <= value < limits.INTEGER:
        raise json_text.expected(_spell(place), "an integer of 64 bits", value)
    if type(value) is str and (reason := json_text.text_reason(value)):
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
            raise invalid(_spell(place), f"the key {json_text.brief(key)} is neither a printable name nor a number of 64 bits")
    if len({key for key, _ in pairs}) != len(pairs):
        raise invalid(_spell(place), "a key stands twice")


def _spell(place: Place) -> str:
    """The path of a tree: `call.x[0].key`."""
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


def _record_fits(body: list[Any]) -> bool:
    """No field is called as Python calls its own attributes; whatever else is printable does."""
    name, kind, names, children = body
    return (
        type(name) is str
        and _is_name(name)
        and kind in RECORDS
        and type(names) is list
        and type(children) is list
        and len(names) == len(children) <= limits.TREE_FIELDS
        and all(type(word) is str and 0 < len(word) <= limits.NAME and word.isprintable() for word in names)
        and not any(word.startswith("__") for word in names)
        and len(set(names)) == len(names)
    )


def _is_name(word: str) -> bool:
    """Whether Python's parser keeps the name as it is: it normalizes some letters (NFKC)."""
    if len(word) > limits.NAME or not word.isidentifier() or iskeyword(word):
        return False
    if word.isascii():
        return True
    from unicodedata import normalize

    return normalize("NFKC", word) == word


# --- reading a tree that was checked --------------------------------------------------------------------------------


def children(tree: Tree) -> list[tuple[str, Tree]]:
    """(name, tree) of the children: a dict's keys as text, a sequence's positions; [] for a leaf."""
    ((kind, body),) = tree.items()
    if kind in ("tensor", "value"):
        return []
    if kind == "dict":
        return [(str(key), child) for key, child in body]
    if kind == "record":
        return list(zip(body[2], body[3], strict=True))
    return [(str(index), child) for index, child in enumerate(body[2] if kind == "namedtuple" else body)]


def holds_tensor(tree: Tree) -> bool:
    """Whether the tree contains a tensor. A tree without one is a constant."""
    return "tensor" in tree or any(holds_tensor(child) for _, child in children(tree))


def recorded_constant(tree: Tree) -> Any:
    """The value of a tree without tensors, in Python's own types: a named tuple as a tuple, a record as a dict."""
    ((kind, body),) = tree.items()
    if kind == "value":
        return body
    if kind == "dict":
        return {key: recorded_constant(child) for key, child in body}
    constants = {name: recorded_constant(child) for name, child in children(tree)}
    return constants if kind == "record" else list(constants.values()) if kind == "list" else tuple(constants.values())
