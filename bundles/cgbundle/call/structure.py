"""A call taken apart into its tensors by its tree (format/pytree.py): one whose arguments are not the tensors as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import CallError, meant
from ..format.pytree import children, holds_tensor, recorded_constant
from ..format.schema import Parameter, Tree


def flattener(call: Tree, parameters: Sequence[Parameter]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[Any]]:
    """A function (args, kwargs) -> tensors in the signature's order.

    Arguments may be given by name, and by position unless their parameter is by name only.  One that holds no tensor may be left
    out where the model's default is what was recorded.  Raises input-structure where the nesting, a key, or a constant differs.
    """
    names = _Names(call, parameters)

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        tensors: list[Any] = []
        for (name, tree), value in zip(names.trees.items(), names.bind(args, kwargs), strict=True):
            _flatten(tree, value, name, tensors)
        return tensors

    return flatten


class _Names:
    """The parameters of a call by name: which may be given by position, and which may be left out, with what they then are."""

    def __init__(self, call: Tree, parameters: Sequence[Parameter]) -> None:
        self.trees: dict[str, Tree] = {name: tree for name, tree in call["call"]}
        self.positional = sum(not parameter.keyword for parameter in parameters)
        self.defaults = {name: parameter.default for name, parameter in zip(self.trees, parameters, strict=True)}
        self.optional = {
            name: recorded_constant(tree) for name, tree in self.trees.items() if may_be_left_out(tree, self.defaults[name])
        }

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The value of every parameter, in order."""
        order = list(self.trees)
        if len(args) > self.positional:
            by_name = order[self.positional :]
            most = (
                f"at most {self.positional} inputs{' by position' if by_name else ''} ({self._needed()})" if order else "no input"
            )
            raise CallError(
                "input-structure",
                f"expected {most}, got {len(args)}",
                f"give {', '.join(by_name)} by name" if by_name else "",
            )
        values = list(args)
        for name in order[len(args) :]:
            if name in kwargs:
                values.append(kwargs[name])
            elif name in self.optional:
                values.append(self.optional[name])
            else:
                raise self._stranger(kwargs) or self._missing(name, args)
        if stranger := self._stranger(kwargs):
            raise stranger
        for name in kwargs:
            if name in order[: len(args)]:
                raise CallError("input-structure", f"input {name!r} is given by position and by name")
        return values

    def _stranger(self, kwargs: Mapping[str, Any]) -> CallError | None:
        """The error of names that no input has: told first, for they may be missing ones misspelt."""
        unknown = [name for name in kwargs if name not in self.trees]
        if not unknown:
            return None
        free = [name for name in self.trees if name not in kwargs]
        names = " or ".join([f"{name!r}{meant(name, free)}" for name in unknown])
        return CallError("input-structure", f"no input is called {names}: the bundle takes {self._needed()}")

    def _missing(self, name: str, args: tuple[Any, ...]) -> CallError:
        if holds_tensor(self.trees[name]):
            text, hint = f"input {name!r} is missing: the bundle takes {self._needed()}", ""
            if len(args) == 1 and isinstance(args[0], tuple | list | dict) and "tensor" in next(iter(self.trees.values())):
                stars = "**" if isinstance(args[0], dict) else "*"
                text += f", and was given {_brief(args[0])}"
                hint = f"every input is an argument of its own: program({stars}inputs)"
            return CallError("input-structure", text, hint)
        recorded = short(recorded_constant(self.trees[name]))
        default = self.defaults[name]
        if default is None:
            return CallError(
                "input-structure", f"input {name!r} is missing: the bundle was built for the constant {recorded}",
                f"give {name}={recorded}",
            )  # fmt: skip
        return CallError(
            "input-structure",
            f"input {name!r} is missing: the bundle was built for the constant {recorded}, "
            f"and the model's default is {short(recorded_constant(default))}",
            f"give {name}={recorded}, or build with inputs() that leaves it out",
        )

    def _needed(self) -> str:
        return ", ".join([name for name in self.trees if name not in self.optional]) or "none"


def may_be_left_out(tree: Tree, default: Tree | None) -> bool:
    """Whether a call may leave out an argument that was recorded as `tree`: the model's default is the same constant."""
    if holds_tensor(tree) or default is None:
        return False
    try:
        _flatten(tree, recorded_constant(default), "", [])
    except CallError:
        return False
    return True


def short(value: Any) -> str:
    """A constant as Python spells it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flatten(tree: Tree, value: Any, where: str, tensors: list[Any]) -> None:
    ((kind, body),) = tree.items()
    if kind == "tensor":
        tensors.append(value)
    elif kind == "value":
        if not _is(value, body):
            raise CallError(
                "input-structure",
                f"input {where!r}: the bundle was built for the constant {short(body)}, got {_brief(value)}",
                "the value is part of the recording: build another bundle for another value",
            )
    elif kind == "dict":
        keys = [key for key, _ in body]
        if not isinstance(value, Mapping) or set(value) != set(keys):
            raise CallError("input-structure", f"input {where!r}: expected a dict with the keys {keys}, got {_brief(value)}")
        for key, child in body:
            _flatten(child, value[key], f"{where}.{key}", tensors)
    elif kind == "record":
        items = _fields(tree, value, where)
        for name, child in children(tree):
            _flatten(child, items[name], f"{where}.{name}", tensors)
    else:
        parts: list[Tree] = body[2] if kind == "namedtuple" else body
        sort: type[list[Any]] | type[tuple[Any, ...]] = list if kind == "list" else tuple
        if not isinstance(value, sort) or len(value) != len(parts):
            raise CallError("input-structure", f"input {where!r}: expected a {kind} of {len(parts)}, got {_brief(value)}")
        for index, (child, item) in enumerate(zip(parts, value, strict=True)):
            _flatten(child, item, f"{where}.{index}", tensors)


def _fields(tree: Tree, value: Any, where: str) -> dict[str, Any]:
    """The fields of a record: of a dict its items, those that are None may be absent; of anything else its attributes."""
    name, _, fields, _ = tree["record"]
    if isinstance(value, Mapping):
        items = {field: None for field, child in children(tree) if child == {"value": None}} | dict(value)
        if items.keys() == set(fields):
            return items
    elif not isinstance(value, tuple | list | str | int | float | None) and all(hasattr(value, field) for field in fields):
        return {field: getattr(value, field) for field in fields}
    raise CallError(
        "input-structure",
        f"input {where!r}: expected a {name} with the fields {fields}, as attributes or as a dict, got {_brief(value)}",
    )


def _is(value: Any, constant: Any) -> bool:
    """Whether two constants are one, of the same type: 1 is neither 1.0 nor True, and 0.0 is not -0.0."""
    return type(value) is type(constant) and value == constant and (type(value) is not float or str(value) == str(constant))


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)[:8]}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value if not isinstance(value, str) or len(value) <= 40 else f"{value[:40]}...")
    return f"a {type(value).__name__}"
