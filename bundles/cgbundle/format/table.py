"""Files of columns, and recordings as views of their columns, without an object per node. A file is a header of 64-bit words
(magic, version, bytes of the file, a count per kind of row), then the columns, little-endian, padded with zeros to 8 bytes. Counts
determine all offsets, so equal columns give equal bytes. `Table` checks the structure, `validate/recordings.py` everything else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BundleError
from .limits import TABLE_BYTES, TABLE_ROWS
from .schema import MEMORIES

Data = bytes | bytearray | memoryview


class Column(NamedTuple):
    """`format`: a code of `struct`; `rows`: its kind of rows; `width`: items per row. `bounds`: row i owns the rows [item i, item i
    + 1) of this other kind. `below`: all items are below this number, or below this count of rows. `at`: the column's name in
    messages."""

    name: str
    format: str
    rows: str
    width: int = 1
    bounds: str = ""
    below: str | int = ""
    at: str = ""


class Layout(NamedTuple):
    """A kind of file. `magic` is 8 bytes; `counts` names the kinds of rows, or of bytes."""

    magic: bytes
    version: int
    counts: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def header(self) -> int:
        return 8 * (3 + len(self.counts))


def unpack(layout: Layout, data: Data, where: str) -> tuple[dict[str, int], dict[str, memoryview]]:
    """The counts, and views of the columns. Raises table-invalid unless header and columns cover `data` exactly and match their
    declarations."""
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
        part = view[begin:end]
        columns[column.name] = part if column.format == "B" else part.cast(column.format)  # type: ignore[call-overload]
        begin = after
    if begin != len(view):
        raise invalid(where, f"the columns end at byte {begin}, the file at {len(view)}")
    for column in layout.columns:
        if column.bounds:
            values, total = columns[column.name].tolist(), counts[column.bounds]
            if values[0] != 0 or values[-1] != total or any(map(int.__gt__, values, values[1:])):
                raise invalid(f"{where}: {column.at}", f"bounds must rise from 0 to {total}")
        elif column.at:
            limit = counts[column.below] if isinstance(column.below, str) else column.below
            largest = max(columns[column.name], default=-1)
            if largest >= limit:
                raise invalid(f"{where}: {column.at}", f"{largest} is not below {limit}")
    return counts, columns


def check_counts(counts: Mapping[str, int], where: str) -> None:
    for name, number in counts.items():
        limit = TABLE_BYTES if name.endswith("_bytes") else TABLE_ROWS
        if number > limit:
            raise invalid(where, f"{number} {name}, more than the limit of {limit}")


def check_length(size: int, where: str) -> None:
    if size > TABLE_BYTES:
        raise invalid(where, f"{size} bytes, more than the limit of {TABLE_BYTES}")


def invalid(where: str, message: str) -> BundleError:
    return BundleError("table-invalid", f"{where}: {message}")


def symbols(images: memoryview, data: memoryview, limits: memoryview, where: str) -> tuple[list[str], list[str]]:
    """The SHA-256s of images, and the names that `limits` delimits in `data`. Raises table-invalid."""
    digits, raw = images.hex(), bytes(data)
    try:
        names = [raw[limits[row] : limits[row + 1]].decode() for row in range(len(limits) - 1)]
        return [digits[begin : begin + 64] for begin in range(0, len(digits), 64)], names
    except UnicodeDecodeError:
        raise invalid(where, "a symbol is not UTF-8") from None


def column_bytes(column: Column, counts: Mapping[str, int]) -> int:
    return (counts[column.rows] * column.width + bool(column.bounds)) * _ITEM[column.format]


_ITEM = {"B": 1, "i": 4, "I": 4, "q": 8, "Q": 8}


# --- recordings -------------------------------------------------------------------------------------------------------

EMPTY, KERNEL, MEMSET, MEMCPY, CONDITIONAL = range(5)  # values of column `kind`
IF, WHILE, SWITCH = range(3)  # values of column `conditional_type`
SET_CONDITION = "cgcompile_set_condition"
"""Symbol of the kernel that sets a condition. Parameters: the address of a byte, which becomes the condition, and the handle."""


def _plain(names: str, format: str, rows: str) -> list[Column]:
    """Columns of one number per row, without constraints."""
    return [Column(name, format, rows) for name in names.split()]


_MEMORY: Any = {"below": len(MEMORIES), "at": "memory"}

RECORDING = Layout(
    magic=b"cgtable\0",
    version=1,
    counts=(
        "keys", "functions", "params", "function_attributes", "symbol_bytes", "nodes", "kernels", "relocations", "undefined",
        "attributes", "memsets", "memcpys", "edges", "block_bytes",
    ),
    columns=(
        Column("key", "Q", "keys"),
        # functions
        Column("image", "B", "functions", 32),
        Column("symbol_bounds", "I", "functions", bounds="symbol_bytes", at="functions.symbol"),
        Column("param_bounds", "I", "functions", bounds="params", at="functions.params"),
        Column("function_attribute_bounds", "I", "functions", bounds="function_attributes", at="functions.attributes"),
        *_plain("param_offset param_size", "I", "params"),
        Column("function_attribute_id", "I", "function_attributes"),
        Column("function_attribute_value", "i", "function_attributes"),
        # nodes: the n-th node of a kind is the n-th row of that kind
        Column("kind", "B", "nodes", below=CONDITIONAL + 1, at="nodes.kind"),
        Column("function", "I", "kernels", below="functions", at="nodes.function"),
        *_plain("grid_x grid_y grid_z threads_x threads_y threads_z shared", "I", "kernels"),
        Column("block_offset", "Q", "kernels"),
        Column("block_size", "I", "kernels"),
        Column("relocation_bounds", "I", "kernels", bounds="relocations", at="nodes.relocations"),
        Column("undefined_bounds", "I", "kernels", bounds="undefined", at="nodes.undefined"),
        Column("attribute_bounds", "I", "kernels", bounds="attributes", at="nodes.attributes"),
        Column("relocation_at", "I", "relocations"),
        Column("relocation_memory", "B", "relocations", **_MEMORY),
        Column("relocation_offset", "Q", "relocations"),
        *_plain("undefined_offset undefined_size", "I", "undefined"),
        Column("attribute_id", "I", "attributes"),
        Column("attribute_value", "q", "attributes", 3),
        Column("memset_memory", "B", "memsets", **_MEMORY),
        Column("memset_offset", "Q", "memsets"),
        *_plain("memset_value memset_element", "I", "memsets"),
        *_plain("memset_width memset_height memset_pitch", "Q", "memsets"),
        Column("memcpy_memory", "B", "memcpys", 2, **_MEMORY),  # source, target
        Column("memcpy_offset", "Q", "memcpys", 2),  # source, target
        Column("memcpy_extent", "Q", "memcpys", 3),  # width, height, depth
        Column("memcpy_pitch", "Q", "memcpys", 4),  # source pitch, source height, target pitch, target height
        # edges
        Column("edge_source", "I", "edges", below="nodes", at="edges.source"),
        Column("edge_target", "I", "edges", below="nodes", at="edges.target"),
        *_plain("edge_from_port edge_to_port edge_type", "B", "edges"),
        # bytes without an index
        Column("symbols", "B", "symbol_bytes"),
        Column("blocks", "B", "block_bytes"),  # each begins at a multiple of 8
    ),
)  # fmt: skip

BRANCHING = Layout(
    magic=RECORDING.magic,
    version=2,
    counts=(*RECORDING.counts, "conditionals", "bodies", "handles"),
    columns=(
        *RECORDING.columns,
        Column("conditional_type", "B", "conditionals", below=SWITCH + 1, at="nodes.type"),
        Column("conditional_bounds", "I", "conditionals", bounds="bodies", at="nodes.bodies"),
        Column("conditional_body", "I", "bodies", below="bodies", at="nodes.bodies"),
        Column("body_begin", "I", "bodies"),  # a position among the nodes
        Column("handle_kernel", "I", "handles", below="kernels", at="nodes.handles"),
        Column("handle_at", "I", "handles"),
        Column("handle_conditional", "I", "handles", below="conditionals", at="nodes.handles"),
    ),
)
"""The layout of a recording with conditional nodes."""

_VERSION = 8  # offset of the version in the header


class Table:
    """A recording's columns by their names in RECORDING, views over `data`, which must stay alive. `images` and `symbols` identify
    the functions. Raises table-invalid."""

    __slots__ = ("counts", "images", "symbols", "where", *(column.name for column in BRANCHING.columns if column.name != "symbols"))

    if TYPE_CHECKING:

        def __getattr__(self, column: str) -> memoryview: ...  # one per column but `symbols`: the slots above

    def __init__(self, data: Data, where: str = "table") -> None:
        self.where = where
        branching = bytes(memoryview(data).cast("B")[_VERSION : _VERSION + 8]) == BRANCHING.version.to_bytes(8, "little")
        self.counts, columns = unpack(BRANCHING if branching else RECORDING, data, where)
        if not branching:
            self.counts |= dict.fromkeys(BRANCHING.counts[len(RECORDING.counts) :], 0)
            columns |= {column.name: _NOTHING for column in BRANCHING.columns[len(RECORDING.columns) :]}
        elif not self.counts["conditionals"]:
            raise invalid(where, f"version {BRANCHING.version} without a conditional node")
        names = columns.pop("symbols")
        for name, view in columns.items():
            setattr(self, name, view)
        self._check_structure()
        self.images, self.symbols = symbols(self.image, names, self.symbol_bounds, f"{where}: functions")

    def _check_structure(self) -> None:
        where, counts, kinds = self.where, self.counts, bytes(self.kind)
        for kind, rows in ((KERNEL, "kernels"), (MEMSET, "memsets"), (MEMCPY, "memcpys"), (CONDITIONAL, "conditionals")):
            if kinds.count(kind) != counts[rows]:
                raise invalid(f"{where}: nodes.kind", f"{kinds.count(kind)} {rows}, expected {counts[rows]}")
        end, blocks = 0, self.blocks
        for offset, size in zip(self.block_offset, self.block_size, strict=True):
            begin = end + -end % 8
            if offset != begin or offset + size > len(blocks) or any(blocks[end:begin]):
                text = f"a block of {size} bytes at {offset}, expected at {begin} of {len(blocks)}, zeros before"
                raise invalid(f"{where}: nodes.block", text)
            end = offset + size
        if len(blocks) != end + -end % 8 or any(blocks[end:]):
            raise invalid(f"{where}: nodes.block", f"the blocks end at {end} of {len(blocks)} bytes")
        if counts["conditionals"]:
            begins = self.body_begin.tolist()
            if any(map(int.__gt__, begins, [*begins[1:], counts["nodes"]])):
                raise invalid(f"{where}: bodies", f"must rise to {counts['nodes']} nodes at most")
            handles = list(zip(self.handle_kernel, self.handle_at, strict=True))
            if any(map(tuple.__ge__, handles, handles[1:])):
                raise invalid(f"{where}: nodes.handles", "must rise by kernel and place")
            for row, (source, target) in enumerate(zip(self.edge_source, self.edge_target, strict=True)):
                if self.graph(source) != self.graph(target):
                    raise invalid(f"{where}: edges[{row}]", f"joins nodes {source} and {target} of two graphs")

    def graph(self, position: int) -> int:
        """The graph of a node: 0 for the recording's own, 1 for the first body, and so on."""
        return bisect_right(self.body_begin, position)

    def spans(self) -> list[tuple[int, int]]:
        return list(pairwise([0, *self.body_begin, self.counts["nodes"]]))


_NOTHING = memoryview(b"")


def launch_order(table: Table) -> list[int]:
    """Node positions in an order in which every edge points forward, as recorded if possible; bodies count as parts of one graph.
    Raises table-invalid for a cycle."""
    total = table.counts["nodes"]
    if all(map(int.__lt__, table.edge_source, table.edge_target)):
        return list(range(total))
    after: dict[int, list[int]] = {}
    waits = [0] * total
    for source, target in zip(table.edge_source, table.edge_target, strict=True):
        after.setdefault(source, []).append(target)
        waits[target] += 1
    done = [node for node in range(total) if not waits[node]]
    for node in done:  # the loop appends to it
        for target in after.get(node, ()):
            waits[target] -= 1
            if not waits[target]:
                done.append(target)
    if len(done) != total:
        raise invalid(f"{table.where}: edges", f"{total - len(done)} nodes lie on or behind a cycle")
    return done
