"""Results that few models have: instances of the model's own classes, and outputs whose sizes depend on data.

Records are instances without the classes: a name, fields, and how they are read.  A record has its fields as attributes and as
items, by name and by position.  A dataclass comes back as a `Record`, which is not iterated, as it was not.  An output of Hugging
Face's comes back as a `MappingRecord`: a mapping of the fields that are not None, in their order, also indexed by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..format.schema import EntrySpec
from ..tensors.library import LEGACY_STREAM, library_of
from ..tensors.tensor import Tensor
from .backend import Backend
from .locks import during
from .outputs import View


class Record:
    """The fields of an instance of one of the model's classes.  Equal if class name, fields and values are equal."""

    __fields__: ClassVar[tuple[str, ...]] = ()
    __kind__: ClassVar[str] = "object"
    __iter__: Any = None  # or Python would iterate over what __getitem__ gives for 0, 1, ...
    __hash__: Any = None

    @classmethod
    def of(cls, values: Sequence[Any]) -> Record:
        """A record of the fields' values, in order."""
        record = cls()
        record.__dict__.update(zip(cls.__fields__, values, strict=True))
        return record

    def __getitem__(self, key: Any) -> Any:
        """A field by name; by position, or a slice of positions, as in a tuple of all."""
        return vars(self)[key] if isinstance(key, str) else _values(self)[key]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([f'{name}={vars(self)[name]!r}' for name in self.__fields__])})"

    def __eq__(self, other: object) -> bool:
        return _names(self) == _names(other) and _values(self) == _values(other) if isinstance(other, Record) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (*_names(self), _values(self))


class MappingRecord(Record, Mapping[str, Any]):
    """A record that is a mapping of its fields that are not None; positions count these alone.  Iterating gives their names."""

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
    """A class of records: `kind` is "object" or "mapping".  A field may be called as a method is, and hides it then."""
    base = MappingRecord if kind == "mapping" else Record
    return type(name, (base,), {"__fields__": fields, "__module__": __name__})


def _names(record: Record) -> tuple[str, str, tuple[str, ...]]:
    return type(record).__name__, record.__kind__, record.__fields__


def _values(record: Record) -> tuple[Any, ...]:
    held = vars(record)
    return tuple([held[name] for name in record.__fields__])


def _again(name: str, kind: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Record:
    return record_class(name, kind, fields).of(values)


# --- outputs whose sizes depend on data -------------------------------------------------------------------------------


class DataSizes:
    """Cuts the outputs of an entry's calls to their true sizes.  On a GPU that waits for the call's end."""

    def __init__(self, entry: EntrySpec, backend: Backend) -> None:
        self._rows, self._backend = entry.data_sizes, backend
        self._counts = sorted({row.count for row in entry.data_sizes})
        self._axes = {index: len(spec.shape) for index, spec in enumerate(entry.outputs)}

    def builder(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """The builder of a result, of what a replay gives."""
        return lambda outputs: build(self.cut(outputs))

    def cut(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs of a replay, flat, with those of `entry.data_sizes` as large as they are; the counts stay behind them."""
        numbers = {place: self._number(outputs[place]) for place in self._counts}
        taken: dict[int, list[slice]] = {}
        for row in self._rows:
            slices = taken.setdefault(row.output, [slice(None)] * self._axes[row.output])
            slices[row.axis] = slice(0, numbers[row.count])
        return [_front(value, tuple(taken[index])) if index in taken else value for index, value in enumerate(outputs)]

    def _number(self, value: Any) -> int:
        value = value.tensor if type(value) is View else value
        if type(value) is not Tensor:
            return int(value)
        if value.device is None:
            return int(value.tolist())
        address = value.address
        return int.from_bytes(during(self._backend, LEGACY_STREAM, lambda stream: self._backend.read(address, 8, stream)), "little")


def _front(value: Any, slices: tuple[slice, ...]) -> Any:
    """The front of a tensor, row-major where it is a copy of the caller's."""
    if type(value) is View:
        return value.part(slices)
    part = value[slices]
    if all(part_of_axis == slice(None) for part_of_axis in slices[1:]):
        return part
    library = library_of(part)
    return library.copy(library.take(part, "")[0]) if library.name != "dlpack" or type(part) is Tensor else part
