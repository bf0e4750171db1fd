"""A file of columns may have exactly as many bytes and rows as the limits allow."""

from __future__ import annotations

from array import array

import pytest

from cgbundle.format import table as column_file
from cgbundle.format.table import Column, Layout, unpack
from cgcompile.bundle import recordings
from cgcompile.bundle.recordings import pack
from tests.helpers.raising import raises

LAYOUT = Layout(
    magic=b"testing\0", version=3, counts=("rows", "name_bytes"),
    columns=(
        Column("number", "Q", "rows"), Column("name", "B", "name_bytes"),
        Column("bound", "I", "rows", bounds="name_bytes", at="bound"),
    ),
)  # fmt: skip
COUNTS = {"rows": 3, "name_bytes": 5}
CONTENTS = {"number": [1, 2, 1 << 63], "name": b"names", "bound": [0, 1, 2, 5]}
SIZE = 8 * 5 + 24 + 8 + 16


def packed() -> bytes:
    return pack(LAYOUT, COUNTS, CONTENTS)


def test_bytes_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed()
    assert len(data) == SIZE
    monkeypatch.setattr(column_file, "TABLE_BYTES", SIZE)
    counts, views = unpack(LAYOUT, packed(), "f")
    assert (counts, {name: view.tolist() for name, view in views.items()}) == (COUNTS, {**CONTENTS, "name": [*b"names"]})
    monkeypatch.setattr(column_file, "TABLE_BYTES", SIZE - 1)
    with raises("table-invalid", match=f"^table: {SIZE} bytes, more than the limit of {SIZE - 1}"):
        packed()
    with raises("table-invalid", match=f"^f: {SIZE} bytes, more than the limit of {SIZE - 1}"):
        unpack(LAYOUT, data, "f")


@pytest.mark.parametrize(("limit", "words"), [("TABLE_ROWS", "3 rows"), ("TABLE_BYTES", "5 name_bytes")])
def test_counts_up_to_the_limit(limit: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, count = packed(), int(words[0])
    for module in (column_file, recordings):
        monkeypatch.setattr(module, "check_length", lambda size, where: None)
    monkeypatch.setattr(column_file, limit, count)
    assert unpack(LAYOUT, packed(), "f")[0] == COUNTS
    monkeypatch.setattr(column_file, limit, count - 1)
    for call in (packed, lambda: unpack(LAYOUT, data, "f")):
        with raises("table-invalid", match=f"{words}, more than the limit of {count - 1}"):
            call()


@pytest.mark.parametrize(
    ("place", "count", "message"),
    [
        (3, 30, "column number ends at byte 280, the file at 88"),
        (3, 4, "column bound ends at byte 104, the file at 88"),
        (4, 1000, "column name ends at byte 1064, the file at 88"),
        (3, 2, "column name: padding is not zero|the columns end at byte"),
        (4, 4, "column name: padding is not zero"),
        (2, 96, "88 bytes, its header says 96"),
        (1, 4, "version 4, expected 3"),
    ],
)
def test_a_header_that_lies(place: int, count: int, message: str) -> None:
    words = array("Q", packed())
    words[place] = count
    with raises("table-invalid", match=f"^f: ({message})"):
        unpack(LAYOUT, words.tobytes(), "f")
