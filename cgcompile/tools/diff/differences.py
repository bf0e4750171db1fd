"""Defines a difference, and compares rows of two manifests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cgbundle.format.shapes import text as size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """`name`: what differs within `part`; `field`: its property, or "" for the whole row.  `a` and `b`: the two values as text,
    None if a bundle has none.  `note` replaces them if they would not explain the difference.  `facts`: numbers for programs.
    `measured`: a rounding error that each build measures; it can be ignored while it is within its bound."""

    part: str
    name: str
    field: str = ""
    a: str | None = None
    b: str | None = None
    note: str = ""
    facts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    measured: bool = False

    @property
    def change(self) -> str:
        """The kind of change from A to B: added, removed or changed."""
        if self.note or (self.a is None) == (self.b is None):
            return "changed"
        return "added" if self.a is None else "removed"


T = TypeVar("T")

Row = Mapping[str, Any]
"""The fields of a record by name; references to other records are names, not numbers."""


BARE = ("dtype", "shape")
"""Fields that are printed without their name."""

ROW_MAJOR = "row-major"

PLAIN = ("", (), None, False, ROW_MAJOR, "weights")
"""Default values, which are not printed in the text of a row."""


def as_row(record: Any, *leave: str, **instead: Any) -> Row:
    """Converts a dataclass to a Row, without the fields `leave`, and with `instead` added or replacing fields."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name not in leave} | instead


def value_text(value: Any) -> str:
    """Formats a field's value: `[batch, 2*seq]`, `rows`, `none`."""
    if isinstance(value, tuple | list):
        operation = len(value) == 3 and value[0] in ("+", "-", "*", "//", "%")
        return size_text(tuple(value)) if operation else f"[{', '.join(map(value_text, value))}]"
    if value is None or value == "":
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def row_text(row: Row) -> str:
    """Formats a row as one line: `float32 [2, 3], memory state`."""
    texts = [value_text(row[name]) for name in BARE if name in row]
    rest = [f"{name} {value_text(value)}" for name, value in row.items() if name not in BARE and value not in PLAIN]
    return ", ".join([*([" ".join(texts)] if texts else []), *rest])


def compare_fields(part: str, name: str, a: Row, b: Row) -> Iterator[Difference]:
    """Yields the differences between two rows of one name.  If `name` is "", each field's name is used."""
    for key in dict.fromkeys([*a, *b]):
        value, other_value = a.get(key), b.get(key)
        if value != other_value:
            facts = {"a": value, "b": other_value} if type(value) is int and type(other_value) is int else {}
            yield Difference(
                part=part, name=name or key, field=key if name else "", a=value_text(value), b=value_text(other_value), facts=facts
            )  # fmt: skip


def compare_rows(part: str, a: Mapping[str, Row], b: Mapping[str, Row], *, ordered: bool = True) -> Iterator[Difference]:
    """Yields the differences between named rows: changed and removed rows in A's order, then added ones, and, if `ordered`, a
    difference in the order of common rows."""
    for name, mine in a.items():
        if name in b:
            yield from compare_fields(part, name, mine, b[name])
        else:
            yield Difference(part=part, name=name, a=row_text(mine))
    for name, theirs in b.items():
        if name not in a:
            yield Difference(part=part, name=name, b=row_text(theirs))
    before, after = [name for name in a if name in b], [name for name in b if name in a]
    if ordered and before != after:
        first = next(index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        yield Difference(part=part, name="order", note=f"of those in both, number {first} is {before[first]} -> {after[first]}")


def unique_names(rows: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Returns rows by name.  A repeated name gets a number: `relu`, `relu (2)`."""
    by_name: dict[str, T] = {}
    seen: Counter[str] = Counter()
    for name, row in rows:
        seen[name] += 1
        by_name[name if seen[name] == 1 else f"{name} ({seen[name]})"] = row
    return by_name
