"""A difference, and how rows of one kind are set side by side."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cgbundle.format.size_expressions import text as size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """`name` is what differs within `part`, `field` which of its properties, "" for the whole.  `a` and `b` are what the bundles
    have, as text, None where one has none; `note` says it where two texts would not; `facts` are its numbers, for programs.
    `measured`: a rounding error that each build measured anew; it says nothing while it is within its bound."""

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
        """added, removed or changed, from A to B."""
        if self.note or (self.a is None) == (self.b is None):
            return "changed"
        return "added" if self.a is None else "removed"


T = TypeVar("T")

Row = Mapping[str, Any]
"""A record as its fields, with names in the place of positions."""


BARE = ("dtype", "shape")
"""Fields that need no name beside their value."""

ROW_MAJOR = "row-major"

PLAIN = ("", (), None, False, ROW_MAJOR, "weights")
"""Values that go without saying where a whole row is told."""


def as_row(record: Any, *leave: str, **instead: Any) -> Row:
    """A dataclass as a Row: without the fields `leave`, `instead` in the place of others or beside them."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name not in leave} | instead


def value_text(value: Any) -> str:
    """A field's value as text: `[batch, 2*seq]`, `rows`, `none`."""
    if isinstance(value, tuple | list):
        operation = len(value) == 3 and value[0] in ("+", "-", "*", "//", "%")
        return size_text(tuple(value)) if operation else f"[{', '.join(map(value_text, value))}]"
    if value is None or value == "":
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def row_text(row: Row) -> str:
    """A whole row on one line: `float32 [2, 3], memory state`."""
    texts = [value_text(row[name]) for name in BARE if name in row]
    rest = [f"{name} {value_text(value)}" for name, value in row.items() if name not in BARE and value not in PLAIN]
    return ", ".join([*([" ".join(texts)] if texts else []), *rest])


def compare_fields(part: str, name: str, a: Row, b: Row) -> Iterator[Difference]:
    """The differences between two rows of one name; where `name` is "", the fields are what has names."""
    for key in dict.fromkeys([*a, *b]):
        one, other = a.get(key), b.get(key)
        if one != other:
            facts = {"a": one, "b": other} if type(one) is int and type(other) is int else {}
            yield Difference(
                part=part, name=name or key, field=key if name else "", a=value_text(one), b=value_text(other), facts=facts
            )  # fmt: skip


def compare_rows(part: str, a: Mapping[str, Row], b: Mapping[str, Row], *, ordered: bool = True) -> Iterator[Difference]:
    """The differences between named rows: those changed and removed in A's order, those added, and, if it matters, whether those in
    both stand in another order."""
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
    """Rows by name; one that has the name of an earlier one is numbered: `relu`, `relu (2)`."""
    by_name: dict[str, T] = {}
    seen: Counter[str] = Counter()
    for name, row in rows:
        seen[name] += 1
        by_name[name if seen[name] == 1 else f"{name} ({seen[name]})"] = row
    return by_name
