"""Flat binary files of columns: what a table and a module state are made of.

A file is a header of 64-bit words (magic, version, bytes of the file, one count per kind of row) and then the columns in order.
Each is little-endian and padded with zeros to a multiple of 8 bytes.  Where a column begins follows from the counts alone, so a
file has one spelling: it is covered exactly, and equal columns give equal bytes.  A mapped file is read in place.
On a big-endian machine, where CUDA does not run, the version word does not match.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import BundleError
from ..format.limits import TABLE_BYTES, TABLE_ROWS

Data = bytes | bytearray | memoryview


class Column(NamedTuple):
    """`format` is a code of `struct` (B, i, I, q, Q), `rows` the count it follows, `width` the items per row.  `extra` items come
    after the last row: one in a column of bounds, where row i owns the items of another column from bounds[i] to bounds[i + 1]."""

    name: str
    format: str
    rows: str
    width: int = 1
    extra: int = 0


class Layout(NamedTuple):
    """What a kind of file holds: `magic` is 8 bytes, `counts` names the kinds of rows; those called bytes are counts of bytes."""

    magic: bytes
    version: int
    counts: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def header(self) -> int:
        """Bytes before the first column."""
        return 8 * (3 + len(self.counts))


def unpack(layout: Layout, data: Data, where: str) -> tuple[dict[str, int], dict[str, memoryview]]:
    """The counts, and views of the columns into `data` (not copied).

    Raises table-invalid, its message starting with `where`, unless the header and the columns cover `data` exactly.
    """
    view = memoryview(data).cast("B")
    check_length(len(view), where)
    if bytes(view[:8]) != layout.magic:
        raise invalid(where, f"begins with {bytes(view[:8])!r}, expected {layout.magic!r}")
    if len(view) < layout.header:
        raise invalid(where, f"{len(view)} bytes, fewer than its header of {layout.header}")
    version, size, *numbers = view[8 : layout.header].cast("Q")
    if version != layout.version:
        raise invalid(where, f"version {version}, expected {layout.version}")
    if size != len(view):
        raise invalid(where, f"{len(view)} bytes, its header says {size}")
    counts = dict(zip(layout.counts, numbers, strict=True))
    check_counts(counts, where)
    columns: dict[str, memoryview] = {}
    begin = layout.header
    for column in layout.columns:
        end = begin + column_bytes(column, counts)
        after = end + -end % 8
        if after > len(view):
            raise invalid(where, f"column {column.name} ends at byte {after}, the file at {len(view)}")
        if any(view[end:after]):
            raise invalid(where, f"column {column.name}: padding is not zero")
        columns[column.name] = _cast(view[begin:end], column.format)
        begin = after
    if begin != len(view):
        raise invalid(where, f"the columns end at byte {begin}, the file at {len(view)}")
    return counts, columns


def check_counts(counts: Mapping[str, int], where: str) -> None:
    """Raises table-invalid for a count beyond the limits."""
    for name, number in counts.items():
        limit = TABLE_BYTES if name.endswith("_bytes") else TABLE_ROWS
        if number > limit:
            raise invalid(where, f"{number} {name}, more than the limit of {limit}")


def check_length(size: int, where: str) -> None:
    """Raises table-invalid for a file beyond the limits."""
    if size > TABLE_BYTES:
        raise invalid(where, f"{size} bytes, more than the limit of {TABLE_BYTES}")


def invalid(where: str, message: str) -> BundleError:
    """The error for a defect at `where`: a file and the path inside it."""
    return BundleError("table-invalid", f"{where}: {message}")


def check_bounds(bounds: memoryview, total: int, where: str) -> None:
    """Raises table-invalid unless `bounds` starts at 0, never falls and ends at `total`."""
    values = bounds.tolist()
    if values[0] != 0 or values[-1] != total or any(map(int.__gt__, values, values[1:])):
        raise invalid(where, f"bounds must rise from 0 to {total}")


def check_below(values: memoryview | bytes, limit: int, where: str) -> None:
    """Raises table-invalid where a value reaches `limit`."""
    if len(values) and max(values) >= limit:
        raise invalid(where, f"{max(values)} is not below {limit}")


def symbols(images: memoryview, data: memoryview, limits: memoryview, where: str) -> tuple[list[str], list[str]]:
    """Of a column of symbols the images, as SHA-256s, and the names that `limits` cuts out of `data`.  Raises table-invalid."""
    digits, raw = images.hex(), bytes(data)
    try:
        names = [raw[limits[row] : limits[row + 1]].decode() for row in range(len(limits) - 1)]
        return [digits[begin : begin + 64] for begin in range(0, len(digits), 64)], names
    except UnicodeDecodeError:
        raise invalid(where, "a symbol is not UTF-8") from None


def column_bytes(column: Column, counts: Mapping[str, int]) -> int:
    """The bytes of a column, without its padding."""
    return (counts[column.rows] * column.width + column.extra) * _ITEM[column.format]


def _cast(view: memoryview, code: str) -> memoryview:
    return view if code == "B" else view.cast(code)  # type: ignore[call-overload]


_ITEM = {"B": 1, "i": 4, "I": 4, "q": 8, "Q": 8}
