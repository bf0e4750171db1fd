"""Frozen dataclasses without the module `dataclasses`, which adds 15 ms to a load: it imports `inspect` and compiles eight methods
per class. `dataclasses.fields`, `asdict`, `replace` and type checkers accept these classes."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace

else:

    def dataclass(*, frozen: bool, kw_only: bool, slots: bool) -> Callable[[type], type]:
        """Works like `dataclasses.dataclass` with exactly these three options."""
        assert frozen and kw_only and slots
        return _with_record_methods

    def replace(record: Any, **changes: Any) -> Any:
        """Works like `dataclasses.replace`."""
        return type(record)(**{name: getattr(record, name) for name in record.__slots__} | changes)


def is_record(value: object) -> bool:
    return hasattr(type(value), "__field_defaults__")


def members(kind: type) -> dict[str, str]:
    return dict(kind.__annotations__)


def defaults(kind: Any) -> dict[str, Any]:
    field_defaults: dict[str, Any] = kind.__field_defaults__
    return field_defaults


def _with_record_methods(plain: type) -> type:
    """Creates the class again, with a slot for each annotated name and the methods of a frozen dataclass."""
    names = tuple(plain.__annotations__)
    body = {name: value for name, value in vars(plain).items() if name not in ("__dict__", "__weakref__")}
    field_defaults = {name: body.pop(name) for name in names if name in body}
    expected, values = frozenset(names), attrgetter(*names)

    def __init__(self: Any, /, **arguments: Any) -> None:
        if len(arguments) < len(expected):
            arguments = field_defaults | arguments
        if arguments.keys() != expected:
            wrong = ", ".join(sorted(arguments.keys() ^ expected))
            raise TypeError(f"{plain.__name__}: arguments that are missing or unknown: {wrong}")
        for name, put in setters:
            put(self, arguments[name])

    def __eq__(self: Any, other: Any) -> bool:
        return bool(values(self) == values(other)) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(values(self))

    def __repr__(self: Any) -> str:
        return f"{plain.__name__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return partial(record_class, **{name: getattr(self, name) for name in names}), ()

    def __setattr__(self: Any, name: str, value: Any) -> None:
        raise AttributeError(f"{plain.__name__} is frozen: {name} cannot be set")

    def __delattr__(self: Any, name: str) -> None:
        raise AttributeError(f"{plain.__name__} is frozen: {name} cannot be deleted")

    methods = (__init__, __eq__, __hash__, __repr__, __reduce__, __setattr__, __delattr__)
    body |= {method.__name__: method for method in methods}
    body |= {"__slots__": names, "__field_defaults__": field_defaults, "__dataclass_fields__": _Fields()}
    record_class = type(plain.__name__, plain.__bases__, body)
    setters = [(name, getattr(record_class, name).__set__) for name in names]
    return record_class


class _Fields:
    """The `__dataclass_fields__` of a class, created when the standard library asks for them."""

    def __get__(self, record: object, kind: type) -> dict[str, Any]:
        from dataclasses import MISSING, field, make_dataclass  # imported here, because no load needs `dataclasses`

        rows = [(name, text, field(default=defaults(kind).get(name, MISSING))) for name, text in members(kind).items()]
        dataclass_type: Any = make_dataclass(kind.__name__, rows, kw_only=True)
        kind.__dataclass_fields__ = fields = dict(dataclass_type.__dataclass_fields__)  # type: ignore[attr-defined]
        return fields
