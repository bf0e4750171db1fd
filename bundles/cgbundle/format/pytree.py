"""Nested inputs and outputs as data, without the model's classes. A tree is an object with one key:

    {"tensor": position}            {"tuple": [trees]}    {"dict": [[key, tree], ...]}, keys str or int, order kept
    {"value": None, a number, ...}  {"list": [trees]}     {"namedtuple": [name, [field, ...], [trees]]}
    {"record": [name, kind, [field, ...], [trees]]}

A record is an instance of another class: `kind` is "object" for attributes (a dataclass, a cache), or "mapping" for one that is
also a dict of its fields that are not None (outputs of Hugging Face's models). The tree of a call is {"call": [[parameter, tree],
...]}. An argument without tensors is a constant: a call must have the recorded value."""

from __future__ import annotations

from keyword import iskeyword
from typing import Any

from ..format import limits
from .limits import invalid
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
        named = ", ".join(map(limits.brief, indices[:8]))
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
        if type(body) is int and not _is_whole(body):
            raise limits.expected(_spell(place), "an integer of 64 bits", body)
        if type(body) is str and (reason := limits.text_reason(body)):
            raise invalid(_spell(place), reason)
        return []
    if kind in ("tuple", "list") and type(body) is list:
        return list(enumerate(body))
    if kind == "dict" and _are_pairs(body):
        _check_keys(body, place)
        return [(key, child) for key, child in body]
    if kind in ("namedtuple", "record") and type(body) is list and _fields_fit(kind, body):
        return list(zip(body[-2], body[-1], strict=True))
    raise invalid(_spell(place), f"{str(kind)[:40]!r} is no structure of this format")


def _are_pairs(body: Any) -> bool:
    return type(body) is list and all(type(pair) is list and len(pair) == 2 for pair in body)


def _check_keys(pairs: list[Any], place: Place) -> None:
    for key, _ in pairs:
        if not (_is_printable(key) if type(key) is str else _is_whole(key)):
            raise invalid(_spell(place), f"the key {limits.brief(key)} is neither a printable name nor a number of 64 bits")
    if len({key for key, _ in pairs}) != len(pairs):
        raise invalid(_spell(place), "a key occurs twice")


def _is_whole(value: Any) -> bool:
    return type(value) is int and -limits.INTEGER <= value < limits.INTEGER


def _is_printable(text: str) -> bool:
    return len(text) <= limits.NAME and text.isprintable()


def _spell(place: Place) -> str:
    keys: list[Any] = []
    while len(place) == 2:
        place, key = place
        keys.append(key)
    return str(place[0]) + "".join([_step(key) for key in reversed(keys)])


def _step(key: str | int) -> str:
    if type(key) is str:
        return f".{key}" if key.isidentifier() and len(key) <= 40 else f"[{key[:40]!r}]"
    return f"[{key}]"


def _fields_fit(kind: str, body: list[Any]) -> bool:
    """Whether the body of a named tuple or record is valid. Fields of a record may have any printable name except `__...`."""
    is_record = kind == "record"
    if len(body) != 3 + is_record or (is_record and body[1] not in RECORDS):
        return False
    name, names, children = body[0], body[-2], body[-1]
    if type(names) is not list or type(children) is not list or not len(names) == len(children) <= limits.TREE_FIELDS:
        return False
    if not all(type(word) is str for word in (name, *names)) or len(set(names)) != len(names) or not _is_name(name):
        return False
    if is_record:
        return all(word and _is_printable(word) and not word.startswith("__") for word in names)
    return all(_is_name(word) and not word.startswith("_") for word in names)


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
    if kind in ("dict", "record"):
        return {key: recorded_constant(child) for key, child in (body if kind == "dict" else children(tree))}
    constants = [recorded_constant(child) for _, child in children(tree)]
    return constants if kind == "list" else tuple(constants)
