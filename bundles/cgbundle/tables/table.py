"""A recording as the executors read it: views of the columns of a mapped `graphs/*.bin`, no object per node.

Making a `Table` checks its structure (header, bounds, references); `validate/recordings.py` states every other invariant.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..format.schema import MEMORIES
from .column_file import Column, Data, Layout, check_below, check_bounds, invalid, symbols, unpack

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
        Column("symbol_bounds", "I", "functions", 1, 1),
        Column("param_bounds", "I", "functions", 1, 1),
        Column("function_attribute_bounds", "I", "functions", 1, 1),
        Column("param_offset", "I", "params"),
        Column("param_size", "I", "params"),
        Column("function_attribute_id", "I", "function_attributes"),
        Column("function_attribute_value", "i", "function_attributes"),
        # nodes: the n-th node of a kind is the n-th row of that kind
        Column("kind", "B", "nodes"),
        Column("function", "I", "kernels"),
        Column("grid_x", "I", "kernels"),
        Column("grid_y", "I", "kernels"),
        Column("grid_z", "I", "kernels"),
        Column("threads_x", "I", "kernels"),
        Column("threads_y", "I", "kernels"),
        Column("threads_z", "I", "kernels"),
        Column("shared", "I", "kernels"),
        Column("block_offset", "Q", "kernels"),
        Column("block_size", "I", "kernels"),
        Column("relocation_bounds", "I", "kernels", 1, 1),
        Column("undefined_bounds", "I", "kernels", 1, 1),
        Column("attribute_bounds", "I", "kernels", 1, 1),
        Column("relocation_at", "I", "relocations"),
        Column("relocation_memory", "B", "relocations"),
        Column("relocation_offset", "Q", "relocations"),
        Column("undefined_offset", "I", "undefined"),
        Column("undefined_size", "I", "undefined"),
        Column("attribute_id", "I", "attributes"),
        Column("attribute_value", "q", "attributes", 3),
        Column("memset_memory", "B", "memsets"),
        Column("memset_offset", "Q", "memsets"),
        Column("memset_value", "I", "memsets"),
        Column("memset_element", "I", "memsets"),
        Column("memset_width", "Q", "memsets"),
        Column("memset_height", "Q", "memsets"),
        Column("memset_pitch", "Q", "memsets"),
        Column("memcpy_memory", "B", "memcpys", 2),  # source, target
        Column("memcpy_offset", "Q", "memcpys", 2),  # source, target
        Column("memcpy_extent", "Q", "memcpys", 3),  # width, height, depth
        Column("memcpy_pitch", "Q", "memcpys", 4),  # source pitch, source height, target pitch, target height
        # edges
        Column("edge_source", "I", "edges"),
        Column("edge_target", "I", "edges"),
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
        Column("conditional_type", "B", "conditionals"),
        Column("conditional_bounds", "I", "conditionals", 1, 1),
        Column("conditional_body", "I", "bodies"),
        Column("body_begin", "I", "bodies"),  # a position among the nodes
        Column("handle_kernel", "I", "handles"),
        Column("handle_at", "I", "handles"),
        Column("handle_conditional", "I", "handles"),
    ),
)
"""The layout of a recording with conditional nodes; one without any has the other."""

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
        self._check_structure(names)
        self.images, self.symbols = symbols(self.image, names, self.symbol_bounds, f"{where}: functions")

    def _check_structure(self, names: memoryview) -> None:
        where, counts = self.where, self.counts
        check_bounds(self.symbol_bounds, len(names), f"{where}: functions.symbol")
        check_bounds(self.param_bounds, counts["params"], f"{where}: functions.params")
        check_bounds(self.function_attribute_bounds, counts["function_attributes"], f"{where}: functions.attributes")
        check_bounds(self.relocation_bounds, counts["relocations"], f"{where}: nodes.relocations")
        check_bounds(self.undefined_bounds, counts["undefined"], f"{where}: nodes.undefined")
        check_bounds(self.attribute_bounds, counts["attributes"], f"{where}: nodes.attributes")
        kinds = bytes(self.kind)
        for kind, rows in ((KERNEL, "kernels"), (MEMSET, "memsets"), (MEMCPY, "memcpys"), (CONDITIONAL, "conditionals")):
            if kinds.count(kind) != counts[rows]:
                raise invalid(f"{where}: nodes.kind", f"{kinds.count(kind)} {rows}, expected {counts[rows]}")
        check_below(kinds, CONDITIONAL + 1, f"{where}: nodes.kind")
        check_below(self.function, counts["functions"], f"{where}: nodes.function")
        check_below(self.edge_source, counts["nodes"], f"{where}: edges.source")
        check_below(self.edge_target, counts["nodes"], f"{where}: edges.target")
        for memory in (self.relocation_memory, self.memset_memory, self.memcpy_memory):
            check_below(memory, len(MEMORIES), f"{where}: memory")
        _check_blocks(self.block_offset, self.block_size, self.blocks, where)
        if counts["conditionals"]:
            _check_bodies(self)

    def graph(self, position: int) -> int:
        """Of a node the graph that it is in: 0 for the recording's own, 1 for the first body, and so on."""
        return bisect_right(self.body_begin, position)

    def moved(self, moves: Sequence[Move]) -> Table | None:
        """The same recording with what lies in `moves` elsewhere; None where it uses none of that."""
        table, changed = copy(self), False
        for memories, offsets in (("relocation_memory", "relocation_offset"), ("memcpy_memory", "memcpy_offset")):
            places, begins = array("B", getattr(self, memories).tobytes()), array("Q", getattr(self, offsets).tobytes())
            for move in moves:
                for row, (memory, begin) in enumerate(zip(getattr(self, memories), getattr(self, offsets), strict=True)):
                    if memory == move.memory and move.begin <= begin < move.end:
                        places[row], begins[row], changed = move.to, move.offset + begin - move.begin, True
            setattr(table, memories, memoryview(places))
            setattr(table, offsets, memoryview(begins))
        return table if changed else None

    def spans(self) -> list[tuple[int, int]]:
        """(first node, behind the last) of the recording's own graph and of each body, in order."""
        return list(pairwise([0, *self.body_begin, self.counts["nodes"]]))


def _check_bodies(table: Table) -> None:
    where, counts = table.where, table.counts
    check_bounds(table.conditional_bounds, counts["bodies"], f"{where}: nodes.bodies")
    check_below(table.conditional_type, SWITCH + 1, f"{where}: nodes.type")
    check_below(table.conditional_body, counts["bodies"], f"{where}: nodes.bodies")
    begins = table.body_begin.tolist()
    if any(map(int.__gt__, begins, [*begins[1:], counts["nodes"]])):
        raise invalid(f"{where}: bodies", f"must rise to {counts['nodes']} nodes at most")
    check_below(table.handle_kernel, counts["kernels"], f"{where}: nodes.handles")
    check_below(table.handle_conditional, counts["conditionals"], f"{where}: nodes.handles")
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
