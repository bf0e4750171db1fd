"""Every invariant of a table beyond its structure: the builder checks before it writes, the loader before it runs.

A message starts with the path of the defect: `graphs/g0-8.bin: nodes[17].grid: ...`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import BundleError
from ..format.schema import MEMORIES

if TYPE_CHECKING:
    from .view import Table

LAUNCH_ATTRIBUTES = {
    2: "cooperative", 4: "cluster dimension", 5: "cluster scheduling policy", 8: "priority", 9: "memory sync domain map",
    10: "memory sync domain", 11: "preferred cluster dimension", 14: "preferred shared memory carveout",
    16: "NVLink centric scheduling",
}  # fmt: skip
"""CUlaunchAttributeID numbers that a kernel node may carry.  Values are 32-bit words, signed or unsigned as read;
those of 9 are bytes."""

FUNCTION_ATTRIBUTES = {
    8: "maximal dynamic shared memory", 9: "preferred shared memory carveout", 11: "cluster width", 12: "cluster height",
    13: "cluster depth", 14: "non-portable cluster size allowed", 15: "cluster scheduling policy",
}  # fmt: skip
"""CUfunction_attribute numbers that can be set."""

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = (1024, 1024, 64)
MAX_THREADS_TOTAL = 1024
"""CUDA's limits on a launch, the same on every architecture so far."""

KERNEL_PORT_PROGRAMMATIC, KERNEL_PORT_LAUNCH_ORDER = 1, 2
EDGE_DEFAULT, EDGE_PROGRAMMATIC = 0, 1

_KERNEL = 1
_ZERO = bytes(8)


def check(table: Table, where: str, memories: Mapping[str, int], images: Collection[str]) -> None:
    """Raises table-invalid at the first broken invariant.

    `memories` gives the bytes of each memory of the bundle, by its name in MEMORIES; `images` the SHA-256 of its kernel images.
    """
    sizes = [memories.get(name, -1) for name in MEMORIES]
    ends = _check_functions(table, where, images)
    _check_launches(table, where, ends)
    _check_relocations(table, where, sizes)
    _check_undefined(table, where)
    _check_memsets(table, where, sizes)
    _check_memcpys(table, where, sizes)
    _check_edges(table, where)


def order(table: Table) -> list[int]:
    """Positions of the nodes so that every edge points forward: as recorded where possible.  Raises table-invalid on a cycle."""
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
        raise BundleError("table-invalid", f"{table.where}: edges: {total - len(done)} nodes lie on or behind a cycle")
    return done


def _check_functions(table: Table, where: str, images: Collection[str]) -> list[int]:
    """Also returns where each function's parameters end, in bytes."""
    ends = []
    for row, (image, symbol) in enumerate(zip(table.images, table.symbols, strict=True)):
        path = f"{where}: functions[{row}]"
        if image not in images:
            raise BundleError("table-invalid", f"{path}.image: {image[:16]}... is not among the bundle's images")
        if not symbol or not symbol.isprintable():
            raise BundleError("table-invalid", f"{path}.symbol: {symbol[:80]!r} is no symbol")
        end = 0
        for param in range(table.param_bounds[row], table.param_bounds[row + 1]):
            offset, size = table.param_offset[param], table.param_size[param]
            if offset < end or not size:
                raise BundleError("table-invalid", f"{path}.params: {size} bytes at {offset}, expected some from byte {end} on")
            end = offset + size
        ends.append(end)
        first, last = table.function_attribute_bounds[row], table.function_attribute_bounds[row + 1]
        if reason := _attributes_reason(table.function_attribute_id[first:last], FUNCTION_ATTRIBUTES):
            raise BundleError("table-invalid", f"{path}.{reason}")
    return ends


def _attributes_reason(numbers: memoryview, known: Mapping[int, str]) -> str:
    """What is wrong with the attributes of a function or launch, or ""."""
    last = -1
    for number in numbers:
        if number not in known:
            return f"attributes: {number} is none of {sorted(known)}"
        if number <= last:
            return f"attributes: {number} after {last}, expected to rise"
        last = number
    return ""


def _check_launches(table: Table, where: str, ends: list[int]) -> None:
    _check_axes(table, where, "grid", (table.grid_x, table.grid_y, table.grid_z), MAX_GRID, None)
    _check_axes(table, where, "threads", (table.threads_x, table.threads_y, table.threads_z), MAX_THREADS, MAX_THREADS_TOTAL)
    for row, (function, size) in enumerate(zip(table.function, table.block_size, strict=True)):
        if ends[function] > size:
            path = f"{where}: {_node(table, _KERNEL, row)}.block"
            raise BundleError("table-invalid", f"{path}: {size} bytes, the function's parameters end at {ends[function]}")
    limits = table.attribute_bounds.tolist()
    for row, (first, last) in enumerate(pairwise(limits)):
        if first != last and (reason := _attributes_reason(table.attribute_id[first:last], LAUNCH_ATTRIBUTES)):
            raise BundleError("table-invalid", f"{where}: {_node(table, _KERNEL, row)}.{reason}")
    values = table.attribute_value.tolist()
    if values and (min(values) < -(1 << 31) or max(values) >= 1 << 32):
        raise BundleError(
            "table-invalid", f"{where}: nodes.attributes: a value between {min(values)} and {max(values)} has more than 32 bits"
        )


def _check_axes(
    table: Table,
    where: str,
    name: str,
    axes: tuple[memoryview, memoryview, memoryview],
    limits: tuple[int, int, int],
    total: int | None,
) -> None:
    rows = list(zip(*axes, strict=True))
    whole = all(not axis or (min(axis) >= 1 and max(axis) <= limit) for axis, limit in zip(axes, limits, strict=True))
    if whole and (total is None or all(x * y * z <= total for x, y, z in rows)):
        return
    for row, sizes in enumerate(rows):
        if not all(1 <= size <= limit for size, limit in zip(sizes, limits, strict=True)):
            raise BundleError("table-invalid", f"{where}: {_node(table, _KERNEL, row)}.{name}: {sizes} is not within {limits}")
        if total is not None and sizes[0] * sizes[1] * sizes[2] > total:
            raise BundleError(
                "table-invalid", f"{where}: {_node(table, _KERNEL, row)}.{name}: {sizes} are more than {total} in all"
            )


def _check_relocations(table: Table, where: str, sizes: list[int]) -> None:
    blocks = bytes(table.blocks)
    limits = table.relocation_bounds.tolist()
    rows = list(zip(table.relocation_at, table.relocation_memory, table.relocation_offset, strict=True))
    for kernel, (begin, size) in enumerate(zip(table.block_offset, table.block_size, strict=True)):
        free = 0
        for at, memory, offset in rows[limits[kernel] : limits[kernel + 1]]:
            if at < free or at + 8 > size:
                path = f"{where}: {_node(table, _KERNEL, kernel)}.relocations"
                raise BundleError(
                    "relocation-invalid", f"{path}: 8 bytes at {at}, expected between {free} and {size}, rising and apart"
                )
            if blocks[begin + at : begin + at + 8] != _ZERO:
                raise BundleError(
                    "table-invalid", f"{where}: {_node(table, _KERNEL, kernel)}.block: the relocated word at {at} is not zero"
                )
            if offset >= sizes[memory] and (offset or sizes[memory]):
                path = f"{where}: {_node(table, _KERNEL, kernel)}.relocations"
                raise BundleError("relocation-invalid", f"{path}: the word at {at} points at {place(memory, offset, sizes)}")
            free = at + 8


def _check_undefined(table: Table, where: str) -> None:
    if not table.counts["undefined"]:
        return
    blocks, relocated = bytes(table.blocks), table.relocation_at.tolist()
    relocations, limits = table.relocation_bounds.tolist(), table.undefined_bounds.tolist()
    rows = list(zip(table.undefined_offset, table.undefined_size, strict=True))
    for kernel, (begin, size) in enumerate(zip(table.block_offset, table.block_size, strict=True)):
        known = relocated[relocations[kernel] : relocations[kernel + 1]]
        free = 0
        for offset, length in rows[limits[kernel] : limits[kernel + 1]]:
            after = bisect_left(known, offset - 7)  # the first relocation that ends behind the range's start
            if offset < free or not length or offset + length > size:
                reason = f"undefined: {length} bytes at {offset}, expected between {free} and {size}, rising and apart"
            elif blocks.count(0, begin + offset, begin + offset + length) != length:
                reason = f"block: the undefined bytes at {offset} are not zero"
            elif after < len(known) and known[after] < offset + length:
                reason = f"undefined: the bytes at {offset} hold a relocation"
            else:
                free = offset + length
                continue
            raise BundleError("table-invalid", f"{where}: {_node(table, _KERNEL, kernel)}.{reason}")


def _check_memsets(table: Table, where: str, sizes: list[int]) -> None:
    for row in range(table.counts["memsets"]):
        path = f"{where}: {_node(table, 2, row)}"
        element = table.memset_element[row]
        width, height, pitch = table.memset_width[row] * element, table.memset_height[row], table.memset_pitch[row]
        if element not in (1, 2, 4):
            raise BundleError("table-invalid", f"{path}.element: {element} bytes, expected 1, 2 or 4")
        _check_extent(path, table.memset_memory[row], table.memset_offset[row], (width, height, 1), (pitch, height), sizes)
        if height > 1 and pitch % element:
            raise BundleError("table-invalid", f"{path}.pitch: {pitch} is no multiple of {element}")


def _check_memcpys(table: Table, where: str, sizes: list[int]) -> None:
    for row in range(table.counts["memcpys"]):
        path = f"{where}: {_node(table, 3, row)}"
        width, height, depth = table.memcpy_extent[3 * row : 3 * row + 3]
        pitches = table.memcpy_pitch[4 * row : 4 * row + 4].tolist()
        for end, name in enumerate(("source", "target")):
            memory, offset = table.memcpy_memory[2 * row + end], table.memcpy_offset[2 * row + end]
            pitch, rows = pitches[2 * end : 2 * end + 2]
            _check_extent(f"{path}.{name}", memory, offset, (width, height, depth), (pitch, rows), sizes)


def _check_extent(
    path: str, memory: int, offset: int, extent: tuple[int, int, int], pitches: tuple[int, int], sizes: list[int]
) -> None:
    """`extent` is bytes x rows x slices; `pitches` the bytes from row to row and the rows from slice to slice."""
    width, height, depth = extent
    pitch, rows = pitches
    if not (width and height and depth):
        raise BundleError("table-invalid", f"{path}: {width} x {height} x {depth}: nothing to write")
    if (height > 1 or depth > 1) and pitch < width:
        raise BundleError("table-invalid", f"{path}: rows {pitch} bytes apart, each of {width}")
    if depth > 1 and rows < height:
        raise BundleError("table-invalid", f"{path}: slices {rows} rows apart, each of {height}")
    end = offset + ((depth - 1) * rows + height - 1) * pitch + width
    if end > sizes[memory]:
        raise BundleError("table-invalid", f"{path}: ends at {place(memory, end, sizes)}")


def _check_edges(table: Table, where: str) -> None:
    columns = (table.edge_source, table.edge_target, table.edge_from_port, table.edge_to_port, table.edge_type)
    if any(any(column) for column in columns[2:]):
        for row, (source, target, out, into, kind) in enumerate(zip(*columns, strict=True)):
            _check_edge_data(f"{where}: edges[{row}]", table.kind[source], table.kind[target], (out, into, kind))
    if len(set(zip(*columns, strict=True))) != table.counts["edges"]:
        raise BundleError("table-invalid", f"{where}: edges: one stands twice")
    order(table)


def _check_edge_data(path: str, source: int, target: int, data: tuple[int, int, int]) -> None:
    out, into, kind = data
    if kind not in (EDGE_DEFAULT, EDGE_PROGRAMMATIC) or into:
        raise BundleError("table-invalid", f"{path}: type {kind}, to port {into}: not known")
    if out and (out not in (KERNEL_PORT_PROGRAMMATIC, KERNEL_PORT_LAUNCH_ORDER) or source != _KERNEL):
        raise BundleError("table-invalid", f"{path}.from_port: {out} of a node of kind {source}")
    if kind == EDGE_PROGRAMMATIC and not (out and source == target == _KERNEL):
        raise BundleError(
            "table-invalid", f"{path}.type: programmatic, from port {out}, between nodes of kinds {source} and {target}"
        )


def _node(table: Table, kind: int, row: int) -> str:
    """`nodes[17]`: where the `row`-th node of a kind stands."""
    position = -1
    kinds = bytes(table.kind)
    for _ in range(row + 1):
        position = kinds.index(kind, position + 1)
    return f"nodes[{position}]"


def place(memory: int, offset: int, sizes: Sequence[int]) -> str:
    """The words for an address that is not there; a size below 0 means that the bundle has no such memory."""
    if sizes[memory] < 0:
        return f"memory {MEMORIES[memory]}, which the bundle does not have"
    return f"byte {offset} of memory {MEMORIES[memory]}, which has {sizes[memory]}"
