"""Nested arguments and results (format/pytree.py): flattens calls into tensors, and builds results that few models have: records
instead of instances of the model's classes, and outputs whose sizes depend on data. A dataclass is returned as a `Record`, which is
not iterable, an output of Hugging Face's models as a `MappingRecord`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import CallError, did_you_mean
from ..format.pytree import children, holds_tensor, recorded_constant
from ..format.schema import EntrySpec, Parameter, Tree
from ..tensors.library import LEGACY_STREAM, library_of
from ..tensors.tensor import Tensor
from .backend import Backend
from .locks import during
from .outputs import View


def flattener(call: Tree, parameters: Sequence[Parameter]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[Any]]:
    """A function (args, kwargs) -> tensors in the signature's order. Arguments that contain no tensor may be left out if the
    model's default is the recorded value. Raises input-structure for another nesting, key, or constant."""
    names = _Names(call, parameters)

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        tensors: list[Any] = []
        for (name, tree), value in zip(names.trees.items(), names.bind(args, kwargs), strict=True):
            _flatten(tree, value, name, tensors)
        return tensors

    return flatten


def _refused(text: str, hint: str = "") -> CallError:
    return CallError("input-structure", text, hint)


class _Names:
    def __init__(self, call: Tree, parameters: Sequence[Parameter]) -> None:
        self.trees: dict[str, Tree] = {name: tree for name, tree in call["call"]}
        self.positional = sum(not parameter.keyword for parameter in parameters)
        self.defaults = {name: parameter.default for name, parameter in zip(self.trees, parameters, strict=True)}
        optional = [name for name, tree in self.trees.items() if may_be_left_out(tree, self.defaults[name])]
        self.optional = {name: recorded_constant(self.trees[name]) for name in optional}
        self.needed = ", ".join([name for name in self.trees if name not in self.optional]) or "none"

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        order = list(self.trees)
        if len(args) > self.positional:
            by_name = order[self.positional :]
            most = f"at most {self.positional} inputs{' by position' if by_name else ''} ({self.needed})" if order else "no input"
            raise _refused(f"expected {most}, got {len(args)}", f"give {', '.join(by_name)} by name" if by_name else "")
        if unknown := [name for name in kwargs if name not in self.trees]:  # first: a misspelt name would also be missing
            free = [name for name in order if name not in kwargs]
            names = " or ".join([f"{name!r}{did_you_mean(name, free)}" for name in unknown])
            raise _refused(f"no input is called {names}: the bundle takes {self.needed}")
        values = list(args)
        for name in order[len(args) :]:
            if name not in kwargs and name not in self.optional:
                raise self._missing(name, args)
            values.append(kwargs[name] if name in kwargs else self.optional[name])
        for name in kwargs:
            if name in order[: len(args)]:
                raise _refused(f"input {name!r} is given by position and by name")
        return values

    def _missing(self, name: str, args: tuple[Any, ...]) -> CallError:
        text = f"input {name!r} is missing: the bundle "
        if holds_tensor(self.trees[name]):
            if len(args) == 1 and isinstance(args[0], tuple | list | dict) and "tensor" in next(iter(self.trees.values())):
                hint = f"every input is an argument of its own: program({'**' if isinstance(args[0], dict) else '*'}inputs)"
                return _refused(f"{text}takes {self.needed}, and was given {_brief(args[0])}", hint)
            return _refused(f"{text}takes {self.needed}")
        recorded, default = short(recorded_constant(self.trees[name])), self.defaults[name]
        text += f"was built for the constant {recorded}"
        if default is None:
            return _refused(text, f"give {name}={recorded}")
        text += f", and the model's default is {short(recorded_constant(default))}"
        return _refused(text, f"give {name}={recorded}, or build with inputs() that leaves it out")


def may_be_left_out(tree: Tree, default: Tree | None) -> bool:
    """Whether the model's default is the constant that was recorded."""
    if holds_tensor(tree) or default is None:
        return False
    try:
        _flatten(tree, recorded_constant(default), "", [])
    except CallError:
        return False
    return True


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flatten(tree: Tree, value: Any, where: str, tensors: list[Any]) -> None:
    ((kind, body),) = tree.items()
    if kind == "tensor":
        tensors.append(value)
    elif kind == "value":  # of the same type: 1 is neither 1.0 nor True, and 0.0 is not -0.0
        if type(value) is not type(body) or value != body or (type(value) is float and str(value) != str(body)):
            text = f"input {where!r}: the bundle was built for the constant {short(body)}, got {_brief(value)}"
            raise _refused(text, "the value is part of the recording: build another bundle for another value")
    elif kind == "dict":
        keys = [key for key, _ in body]
        if not isinstance(value, Mapping) or set(value) != set(keys):
            raise _refused(f"input {where!r}: expected a dict with the keys {keys}, got {_brief(value)}")
        for key, child in body:
            _flatten(child, value[key], f"{where}.{key}", tensors)
    elif kind == "record":
        items = _fields(tree, value, where)
        for name, child in children(tree):
            _flatten(child, items[name], f"{where}.{name}", tensors)
    else:
        parts: list[Tree] = body[2] if kind == "namedtuple" else body
        if not isinstance(value, list if kind == "list" else tuple) or len(value) != len(parts):
            raise _refused(f"input {where!r}: expected a {kind} of {len(parts)}, got {_brief(value)}")
        for index, (child, item) in enumerate(zip(parts, value, strict=True)):
            _flatten(child, item, f"{where}.{index}", tensors)


def _fields(tree: Tree, value: Any, where: str) -> dict[str, Any]:
    """The fields of a record: items of a dict, where None fields may be absent, or attributes of an object."""
    name, _, fields, _ = tree["record"]
    if isinstance(value, Mapping):
        items = {field: None for field, child in children(tree) if child == {"value": None}} | dict(value)
        if items.keys() == set(fields):
            return items
    elif not isinstance(value, tuple | list | str | int | float | None) and all(hasattr(value, field) for field in fields):
        return {field: getattr(value, field) for field in fields}
    expected = f"a {name} with the fields {fields}, as attributes or as a dict"
    raise _refused(f"input {where!r}: expected {expected}, got {_brief(value)}")


def _brief(value: Any) -> str:
    kind = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        return f"{kind} with the keys {list(value)[:8]}"
    if isinstance(value, tuple | list):
        return f"{kind} of {len(value)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value if not isinstance(value, str) or len(value) <= 40 else f"{value[:40]}...")
    return kind


# --- results -------------------------------------------------------------------------------------------------------------


class Record:
    """The fields of an instance of one of the model's classes.  Equal if class name, fields and values are equal."""

    __fields__: ClassVar[tuple[str, ...]] = ()
    __kind__: ClassVar[str] = "object"
    __iter__: Any = None  # otherwise Python would iterate by __getitem__ with 0, 1, ...
    __hash__: Any = None

    @classmethod
    def of(cls, values: Sequence[Any]) -> Record:
        """A record of the fields' values, in order."""
        record = cls()
        record.__dict__.update(zip(cls.__fields__, values, strict=True))
        return record

    def __getitem__(self, key: Any) -> Any:
        """A field by its name or position, or a tuple of fields by a slice."""
        return vars(self)[key] if isinstance(key, str) else _values(self)[key]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([f'{name}={vars(self)[name]!r}' for name in self.__fields__])})"

    def __eq__(self, other: object) -> bool:
        return _names(self) == _names(other) and _values(self) == _values(other) if isinstance(other, Record) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (*_names(self), _values(self))


class MappingRecord(Record, Mapping[str, Any]):
    """A record that is a mapping of its fields that are not None; positions count these only."""

    __kind__ = "mapping"
    __hash__: Any = None

    def __getitem__(self, key: Any) -> Any:
        present = {name: value for name, value in zip(self.__fields__, _values(self), strict=True) if value is not None}
        return present[key] if isinstance(key, str) else tuple(present.values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, value in zip(self.__fields__, _values(self), strict=True) if value is not None])

    def __len__(self) -> int:
        return sum(value is not None for value in _values(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return {name: self[name] for name in self} == {name: other[name] for name in other}

    def to_tuple(self) -> tuple[Any, ...]:
        """The values of the fields that are not None."""
        return tuple([value for value in _values(self) if value is not None])


def record_class(name: str, kind: str, fields: tuple[str, ...]) -> type[Record]:
    """`kind` is "object" or "mapping". A field with the name of a method hides it."""
    base = MappingRecord if kind == "mapping" else Record
    return type(name, (base,), {"__fields__": fields, "__module__": __name__})


def _names(record: Record) -> tuple[str, str, tuple[str, ...]]:
    return type(record).__name__, record.__kind__, record.__fields__


def _values(record: Record) -> tuple[Any, ...]:
    return tuple([vars(record)[name] for name in record.__fields__])


def _again(name: str, kind: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Record:
    return record_class(name, kind, fields).of(values)


# --- outputs whose sizes depend on data -------------------------------------------------------------------------------


class DataSizes:
    """Cuts outputs to their true sizes. On a GPU this waits for the end of the call."""

    def __init__(self, entry: EntrySpec, backend: Backend) -> None:
        self._rows, self._backend = entry.data_sizes, backend
        self._counts = sorted({row.count for row in entry.data_sizes})
        self._axes = {index: len(spec.shape) for index, spec in enumerate(entry.outputs)}

    def cut(self, outputs: Sequence[Any]) -> list[Any]:
        """The flat outputs of a replay, cut to their true sizes; the counts stay at the end."""
        numbers = {place: self._number(outputs[place]) for place in self._counts}
        ranges: dict[int, list[slice]] = {}
        for row in self._rows:
            slices = ranges.setdefault(row.output, [slice(None)] * self._axes[row.output])
            slices[row.axis] = slice(0, numbers[row.count])
        return [_front(value, tuple(ranges[index])) if index in ranges else value for index, value in enumerate(outputs)]

    def _number(self, value: Any) -> int:
        value = value.tensor if type(value) is View else value
        if type(value) is not Tensor:
            return int(value)
        if value.device is None:
            return int(value.tolist())
        address = value.address
        return int.from_bytes(during(self._backend, LEGACY_STREAM, lambda stream: self._backend.read(address, 8, stream)), "little")


def _front(value: Any, slices: tuple[slice, ...]) -> Any:
    """The front of a tensor, row-major if it is a copy."""
    if type(value) is View:
        return value.part(slices)
    part = value[slices]
    if all(part_of_axis == slice(None) for part_of_axis in slices[1:]):
        return part
    library = library_of(part)
    return library.copy(library.take(part, "")[0]) if library.name != "dlpack" or type(part) is Tensor else part
