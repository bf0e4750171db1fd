"""Encodes frozen dataclasses as JSON, followed by the contents of `bytes` fields.  Decoding runs no code, unlike a pickle.

Decoded values have the types of the annotations: numbers, strings, tuples, unions of these, and other records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

LENGTH = 8
"""Bytes of the little-endian length of the JSON."""

SCALARS = (bool, int, float, str, type(None))


def encode(record: object) -> bytes:
    """Encodes a dataclass.  Raises TypeError for values that `decode` does not support."""
    blobs: list[bytes] = []
    text = json.dumps(_plain(record, blobs), separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(LENGTH, "little"), text, *blobs])


def decode(kind: type[Record], data: bytes) -> Record:
    """Decodes a record of class `kind`.  Raises ValueError for invalid data."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    try:
        plain = json.loads(data[LENGTH:end])
    except RecursionError:
        raise ValueError("nested too deeply") from None
    blobs = _Blobs(data, end)
    record: Record = _value(kind, plain, blobs)
    if blobs.place != len(data):
        raise ValueError(f"{len(data) - blobs.place} bytes belong to nothing")
    return record


def _plain(value: object, blobs: list[bytes]) -> object:
    if type(value) in SCALARS:
        return value
    if type(value) is tuple:
        return [_plain(element, blobs) for element in value]
    if type(value) is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: [_plain(getattr(value, field.name), blobs) for field in fields(value)]}
    raise TypeError(f"a record cannot hold a {type(value).__name__}")


class _Blobs:
    """Reads the contents of `bytes` fields in the order in which they were written."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self.place = data, place

    def take(self, size: object) -> bytes:
        if type(size) is not int or not 0 <= size <= len(self.data) - self.place:
            raise ValueError(f"no {size!r} bytes are left")
        self.place += size
        return self.data[self.place - size : self.place]


def _value(kind: Any, plain: Any, blobs: _Blobs) -> Any:
    if get_origin(kind) in (Union, UnionType):
        kind = next((member for member in get_args(kind) if _fits(member, plain)), None)
    if kind is None or not _fits(kind, plain):
        raise ValueError(f"{str(plain)[:40]} is no {getattr(kind, '__name__', kind)}")
    if get_origin(kind) is tuple:
        return tuple([_value(member, element, blobs) for member, element in _pairs(get_args(kind), plain)])
    if kind is bytes:
        return blobs.take(plain["bytes"])
    if hasattr(kind, "__dataclass_fields__"):
        names = _members(kind)
        fields = plain[kind.__name__]
        if type(fields) is not list or len(fields) != len(names):
            raise ValueError(f"{kind.__name__} has {len(names)} fields")
        return kind(**{name: _value(member, field_value, blobs) for (name, member), field_value in zip(names, fields, strict=True)})
    return plain


def _pairs(members: tuple[Any, ...], plain: list[Any]) -> Iterator[tuple[Any, Any]]:
    if members[-1:] == (Ellipsis,):
        return ((members[0], element) for element in plain)
    return zip(members, plain, strict=True)  # raises ValueError if the lengths differ


def _fits(kind: Any, plain: Any) -> bool:
    if get_origin(kind) is tuple:
        return type(plain) is list
    if kind is bytes or hasattr(kind, "__dataclass_fields__"):
        return type(plain) is dict and [*plain] == [kind.__name__]
    return type(plain) is kind or (kind is float and type(plain) is int)  # an int in a float field stays an int


@cache
def _members(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple([(field.name, hints[field.name]) for field in fields(kind)])
