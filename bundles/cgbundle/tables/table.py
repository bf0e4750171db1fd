"""A recording as the executors read it: views of the columns of a mapped `graphs/*.bin`, no object per node.  And files of columns.

A file of columns is a header of 64-bit words (magic, version, bytes of the file, one count per kind of row) and then the columns in
order.  Each is little-endian and padded with zeros to a multiple of 8 bytes.  Where a column begins follows from the counts alone,
so a file has one spelling: it is covered exactly, and equal columns give equal bytes.  A mapped file is read in place.  On a
big-endian machine, where CUDA does not run, the version word does not match.

Making a `Table` checks its structure (header, bounds, references); `validate/recordings.py` states every other invariant.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..errors import BundleError
from ..format.limits import TABLE_BYTES, TABLE_ROWS
from ..format.schema import MEMORIES

Data = bytes | bytearray | memoryview


class Column(NamedTuple):
    """`format` is a code of `struct` (B, i, I, q, Q), `rows` the count it follows, `width` the items per row.

    `bounds`: row i owns the rows of this other kind from item i to item i + 1, so that there is an item more than rows.  `below`:
    every item lies below this count of rows, or number.  `at` is what messages call the column.
    """

    name: str
    format: str
    rows: str
    width: int = 1
    bounds: str = ""
    below: str | int = ""
    at: str = ""


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

    Raises table-invalid, its message starting with `where`, unless the header and the columns cover `data` exactly, and columns are
    as they are declared.
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
    for column in layout.columns:
        if column.bounds:
            _check_bounds(columns[column.name].tolist(), counts[column.bounds], f"{where}: {column.at}")
        elif column.at:
            limit = counts[column.below] if isinstance(column.below, str) else column.below
            if len(values := columns[column.name]) and max(values) >= limit:
                raise invalid(f"{where}: {column.at}", f"{max(values)} is not below {limit}")
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


def _check_bounds(values: list[int], total: int, where: str) -> None:
    """Raises table-invalid unless `values` start at 0, never fall and end at `total`."""
    if values[0] != 0 or values[-1] != total or any(map(int.__gt__, values, values[1:])):
        raise invalid(where, f"bounds must rise from 0 to {total}")


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
    return (counts[column.rows] * column.width + bool(column.bounds)) * _ITEM[column.format]


def _cast(view: memoryview, code: str) -> memoryview:
    return view if code == "B" else view.cast(code)  # type: ignore[call-overload]


_ITEM = {"B": 1, "i": 4, "I": 4, "q": 8, "Q": 8}


# --- recordings -------------------------------------------------------------------------------------------------------

EMPTY, KERNEL, MEMSET, MEMCPY, CONDITIONAL = range(5)
"""Kinds of nodes, as column `kind` holds them."""

IF, WHILE, SWITCH = range(3)
"""Types of conditional nodes, as column `conditional_type` holds them."""

SET_CONDITION = "cgcompile_set_condition"
"""The symbol of the kernel that sets a conditional node's condition.

It takes the address of a byte, and 8 bytes further the handle.  The condition becomes the byte: true where it is not 0.
"""

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
        Column("param_offset", "I", "params"),
        Column("param_size", "I", "params"),
        Column("function_attribute_id", "I", "function_attributes"),
        Column("function_attribute_value", "i", "function_attributes"),
        # nodes: the n-th node of a kind is the n-th row of that kind
        Column("kind", "B", "nodes", below=CONDITIONAL + 1, at="nodes.kind"),
        Column("function", "I", "kernels", below="functions", at="nodes.function"),
        Column("grid_x", "I", "kernels"),
        Column("grid_y", "I", "kernels"),
        Column("grid_z", "I", "kernels"),
        Column("threads_x", "I", "kernels"),
        Column("threads_y", "I", "kernels"),
        Column("threads_z", "I", "kernels"),
        Column("shared", "I", "kernels"),
        Column("block_offset", "Q", "kernels"),
        Column("block_size", "I", "kernels"),
        Column("relocation_bounds", "I", "kernels", bounds="relocations", at="nodes.relocations"),
        Column("undefined_bounds", "I", "kernels", bounds="undefined", at="nodes.undefined"),
        Column("attribute_bounds", "I", "kernels", bounds="attributes", at="nodes.attributes"),
        Column("relocation_at", "I", "relocations"),
        Column("relocation_memory", "B", "relocations", below=len(MEMORIES), at="memory"),
        Column("relocation_offset", "Q", "relocations"),
        Column("undefined_offset", "I", "undefined"),
        Column("undefined_size", "I", "undefined"),
        Column("attribute_id", "I", "attributes"),
        Column("attribute_value", "q", "attributes", 3),
        Column("memset_memory", "B", "memsets", below=len(MEMORIES), at="memory"),
        Column("memset_offset", "Q", "memsets"),
        Column("memset_value", "I", "memsets"),
        Column("memset_element", "I", "memsets"),
        Column("memset_width", "Q", "memsets"),
        Column("memset_height", "Q", "memsets"),
        Column("memset_pitch", "Q", "memsets"),
        Column("memcpy_memory", "B", "memcpys", 2, below=len(MEMORIES), at="memory"),  # source, target
        Column("memcpy_offset", "Q", "memcpys", 2),  # source, target
        Column("memcpy_extent", "Q", "memcpys", 3),  # width, height, depth
        Column("memcpy_pitch", "Q", "memcpys", 4),  # source pitch, source height, target pitch, target height
        # edges
        Column("edge_source", "I", "edges", below="nodes", at="edges.source"),
        Column("edge_target", "I", "edges", below="nodes", at="edges.target"),
        Column("edge_from_port", "B", "edges"),
        Column("edge_to_port", "B", "edges"),
        Column("edge_type", "B", "edges"),
        # bulk
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
"""The layout of a recording with conditional nodes; one without any has the other."""

_PLACES = (("relocation_memory", "relocation_offset"), ("memset_memory", "memset_offset"), ("memcpy_memory", "memcpy_offset"))
"""The columns that say where something lies: memories, and bytes into them."""

_VERSION = 8
"""Where a table's header has its version, in bytes."""


class Move(NamedTuple):
    """Bytes [begin, end) of memory `memory` that a launch finds elsewhere: from `offset` of memory `to` on.  Memories are positions
    in MEMORIES."""

    memory: int
    begin: int
    end: int
    to: int
    offset: int


class Table:
    """A recording's columns, by their names in RECORDING: memoryviews of ints over the bytes given, which must stay.

    `images` and `symbols` are the functions' identities, `where` what messages start with.  Raises table-invalid.
    """

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
        where, counts = self.where, self.counts
        kinds = bytes(self.kind)
        for kind, rows in ((KERNEL, "kernels"), (MEMSET, "memsets"), (MEMCPY, "memcpys"), (CONDITIONAL, "conditionals")):
            if kinds.count(kind) != counts[rows]:
                raise invalid(f"{where}: nodes.kind", f"{kinds.count(kind)} {rows}, expected {counts[rows]}")
        _check_blocks(self.block_offset, self.block_size, self.blocks, where)
        if counts["conditionals"]:
            _check_bodies(self)

    def graph(self, position: int) -> int:
        """Of a node the graph that it is in: 0 for the recording's own, 1 for the first body, and so on."""
        return bisect_right(self.body_begin, position)

    def moved(self, moves: Sequence[Move]) -> Table | None:
        """The same recording with what lies in `moves`, which do not overlap, elsewhere; None where it uses none of that."""
        table, changed = copy(self), False
        ordered = sorted(moves)
        begins = [(move.memory, move.begin) for move in ordered]
        for memories, offsets in _PLACES:
            places, starts = array("B", getattr(self, memories).tobytes()), array("Q", getattr(self, offsets).tobytes())
            for row, place in enumerate(zip(places, starts, strict=True)):
                at = bisect_right(begins, place) - 1
                if at < 0 or place[0] != ordered[at].memory or place[1] >= ordered[at].end:
                    continue
                move = ordered[at]
                places[row], starts[row], changed = move.to, move.offset + place[1] - move.begin, True
            setattr(table, memories, memoryview(places))
            setattr(table, offsets, memoryview(starts))
        return table if changed else None

    def spans(self) -> list[tuple[int, int]]:
        """(first node, behind the last) of the recording's own graph and of each body, in order."""
        return list(pairwise([0, *self.body_begin, self.counts["nodes"]]))


def _check_bodies(table: Table) -> None:
    where, counts = table.where, table.counts
    begins = table.body_begin.tolist()
    if any(map(int.__gt__, begins, [*begins[1:], counts["nodes"]])):
        raise invalid(f"{where}: bodies", f"must rise to {counts['nodes']} nodes at most")
    handles = list(zip(table.handle_kernel, table.handle_at, strict=True))
    if any(map(tuple.__ge__, handles, handles[1:])):
        raise invalid(f"{where}: nodes.handles", "must rise by kernel and place")
    for row, (source, target) in enumerate(zip(table.edge_source, table.edge_target, strict=True)):
        if table.graph(source) != table.graph(target):
            raise invalid(f"{where}: edges[{row}]", f"joins nodes {source} and {target} of two graphs")


def _check_blocks(offsets: memoryview, sizes: memoryview, blocks: memoryview, where: str) -> None:
    end = 0
    for offset, size in zip(offsets, sizes, strict=True):
        begin = end + -end % 8
        if offset != begin or offset + size > len(blocks) or any(blocks[end:begin]):
            raise invalid(
                f"{where}: nodes.block", f"a block of {size} bytes at {offset}, expected at {begin} of {len(blocks)}, zeros before"
            )
        end = offset + size
    if len(blocks) != end + -end % 8 or any(blocks[end:]):
        raise invalid(f"{where}: nodes.block", f"the blocks end at {end} of {len(blocks)} bytes")


_NOTHING = memoryview(b"")


def launch_order(table: Table) -> list[int]:
    """Positions of the nodes so that every edge points forward: as recorded where possible.  Raises table-invalid on a cycle.

    Bodies stand among them as if they were parts of one graph: what matters is the order inside each.
    """
    total = table.counts["nodes"]
    if all(map(int.__lt__, table.edge_source, table.edge_target)):
        return list(range(total))
    after: dict[int, list[int]] = {}
    waits = [0] * total
    for source, target in zip(table.edge_source, table.edge_target, strict=True):
        after.setdefault(source, []).append(target)
        waits[target] += 1
    done = [node for node in range(total) if not waits[node]]
    for node in done:  # grows while it is walked
        for target in after.get(node, ()):
            waits[target] -= 1
            if not waits[target]:
                done.append(target)
    if len(done) != total:
        raise invalid(f"{table.where}: edges", f"{total - len(done)} nodes lie on or behind a cycle")
    return done
