"""The arguments of a call, as Python values and as Python source text."""

from __future__ import annotations

from collections.abc import Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

from cgbundle.call.entry import builder
from cgbundle.call.structure import may_be_left_out
from cgbundle.format.pytree import children, holds_tensor, recorded_constant
from cgbundle.format.schema import EntrySpec, Tree

LINE = 200
"""Longest line, in characters, that `nested` returns."""


class Constant(NamedTuple):
    """An argument, or a part of one, that is not a tensor.  `name` is for example `temperature` or `cache.size`.  `default` is a
    tuple with the model's default value, or () if there is none or it is unknown.  `keyword`: keyword-only."""

    name: str
    value: Any
    default: tuple[Any, ...]
    keyword: bool
    required: bool


def constants(entry: EntrySpec) -> list[Constant]:
    """Lists the constants of a call, in order.  An argument with tensors yields only its leaves that are not tensors."""
    call_constants = []
    for name, tree, keyword, default in _parameters(entry):
        if holds_tensor(tree):
            call_constants += [Constant(path, value, (), keyword, True) for path, value in _leaves(name, tree)]
        else:
            preset = () if default is None else (recorded_constant(default),)
            call_constants.append(Constant(name, recorded_constant(tree), preset, keyword, not _optional(entry, tree, default)))
    return call_constants


def arranged(entry: EntrySpec, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns (args, kwargs) of a call with `tensors`, which are in the order of the signature.  All constants are passed."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, tree, keyword, _ in _parameters(entry):
        value = builder(tree)(tensors)
        if keyword:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs


def spelled(entry: EntrySpec) -> str:
    """Returns the source text of a call, such as `ids, mask, temperature=2.0`, without constants that equal their default.  An
    argument that holds tensors is a variable with the name of its parameter."""
    parts, by_name = [], False
    for name, tree, keyword, default in _parameters(entry):
        if _optional(entry, tree, default):
            by_name = True  # after an omitted argument, arguments are passed by keyword
            continue
        by_name = by_name or keyword or not holds_tensor(tree)
        text = _variable(name) if holds_tensor(tree) else repr(recorded_constant(tree))
        parts.append(text if not by_name else f"{name}={text}" if _is_variable(name) else f"**{{{name!r}: {text}}}")
    return ", ".join(parts)


def nested(entry: EntrySpec) -> list[str]:
    """Returns assignments such as `cache = {'layers': [...]}` for the arguments that contain tensors in containers.  A tensor is a
    variable with the name of its input.  Lines longer than LINE are omitted."""
    names = [spec.name for spec in entry.inputs]
    lines = [
        f"{_variable(name)} = {_template(tree, names)}"
        for name, tree, _, _ in _parameters(entry)
        if holds_tensor(tree) and "tensor" not in tree
    ]
    return [line for line in lines if len(line) <= LINE]


def _template(tree: Tree, names: Sequence[str]) -> str:
    ((kind, body),) = tree.items()
    if kind in ("tensor", "value"):
        return _variable(names[body]) if kind == "tensor" else repr(body)
    if kind in ("dict", "record"):
        keys = [key for key, _ in body] if kind == "dict" else body[2]
        parts = zip(keys, children(tree), strict=True)
        return "{" + ", ".join([f"{key!r}: {_template(child, names)}" for key, (_, child) in parts]) + "}"
    inner = ", ".join([_template(child, names) for _, child in children(tree)])
    return f"[{inner}]" if kind == "list" else f"({inner},)" if inner else "()"


def _variable(name: str) -> str:
    """Converts the name of a parameter to a valid variable name.  A key of `**kwargs` may be any text."""
    variable = "".join([letter if letter.isidentifier() or letter.isdecimal() else "_" for letter in name])
    return variable if _is_variable(variable) else f"_{variable}" if variable[:1].isdecimal() else f"{variable}_"


def _is_variable(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)


def _parameters(entry: EntrySpec) -> list[tuple[str, Tree, bool, Tree | None]]:
    """Returns (name, tree, keyword-only, default) of every parameter."""
    pairs: list[tuple[str, Tree]] = [(name, tree) for name, tree in entry.call["call"]]
    return [
        (name, tree, parameter.keyword, parameter.default) for (name, tree), parameter in zip(pairs, entry.parameters, strict=True)
    ]


def _optional(entry: EntrySpec, tree: Tree, default: Tree | None) -> bool:
    return may_be_left_out(tree, default)


def _leaves(path: str, tree: Tree) -> list[tuple[str, Any]]:
    if "value" in tree:
        return [(path, tree["value"])]
    return [leaf for name, child in children(tree) for leaf in _leaves(f"{path}.{name}", child)]
