"""Invariants of recordings beyond their structure. Messages start with a path: `graphs/g0-8.bin: nodes[17].grid:
...`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import prod

from ..errors import BundleError
from ..format.schema import MEMORIES
from ..format.table import CONDITIONAL, KERNEL, MEMCPY, MEMSET, SET_CONDITION, Table, invalid, launch_order

PEER = MEMORIES.index("peer")

LAUNCH_ATTRIBUTES = {
    2: "cooperative", 4: "cluster dimension", 5: "cluster scheduling policy", 8: "priority", 9: "memory sync domain map",
    10: "memory sync domain", 11: "preferred cluster dimension", 14: "preferred shared memory carveout",
    16: "NVLink centric scheduling",
}  # fmt: skip
"""CUlaunchAttributeID numbers that a kernel node may have. Values are 32-bit words; those of 9 are bytes."""

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

_ZERO = bytes(8)


def check_recording(table: Table, memories: Mapping[str, int], images: Collection[str]) -> None:
    """Raises table-invalid or relocation-invalid for the first broken invariant. `memories`: bytes by name; `images`: SHA-256 of
    the kernel images."""
    sizes = [memories.get(name, -1) for name in MEMORIES]
    _check_launches(table, _check_functions(table, images))
    _check_relocations(table, sizes)
    _check_undefined(table)
    _check_copies(table, sizes)
    _check_edges(table)
    if CONDITIONAL in bytes(table.kind) or table.counts["handles"] or SET_CONDITION in table.symbols:
        from .special_kernels import check_conditionals  # few models have any

        check_conditionals(table)
    if PEER in bytes(table.memset_memory) or PEER in bytes(table.memcpy_memory):
        raise invalid(f"{table.where}: memory", "a memset or memcpy in memory peer, which kernels alone write to")


def _check_functions(table: Table, images: Collection[str]) -> list[int]:
    """Returns the end of each function's parameters, in bytes."""
    ends = []
    for row, (image, symbol) in enumerate(zip(table.images, table.symbols, strict=True)):
        path = f"{table.where}: functions[{row}]"
        if image not in images:
            raise invalid(f"{path}.image", f"{image[:16]}... is not among the bundle's images")
        if not symbol or not symbol.isprintable():
            raise invalid(f"{path}.symbol", f"{symbol[:80]!r} is no symbol")
        end = 0
        for param in range(table.param_bounds[row], table.param_bounds[row + 1]):
            offset, size = table.param_offset[param], table.param_size[param]
            if offset < end or not size:
                raise invalid(f"{path}.params", f"{size} bytes at {offset}, expected some from byte {end} on")
            end = offset + size
        ends.append(end)
        first, last = table.function_attribute_bounds[row], table.function_attribute_bounds[row + 1]
        if reason := _attributes_reason(table.function_attribute_id[first:last], FUNCTION_ATTRIBUTES):
            raise invalid(f"{path}.attributes", reason)
    return ends


def _attributes_reason(numbers: memoryview, known: Mapping[int, str]) -> str:
    """Why attribute numbers of a function or launch are invalid, or ""."""
    last = -1
    for number in numbers:
        if number not in known:
            return f"{number} is none of {sorted(known)}"
        if number <= last:
            return f"{number} after {last}, expected to rise"
        last = number
    return ""


def _check_launches(table: Table, ends: list[int]) -> None:
    grid, threads = (table.grid_x, table.grid_y, table.grid_z), (table.threads_x, table.threads_y, table.threads_z)
    for name, axes, limits, total in (("grid", grid, MAX_GRID, None), ("threads", threads, MAX_THREADS, MAX_THREADS_TOTAL)):
        rows = list(zip(*axes, strict=True))
        fits = all(not axis or (min(axis) >= 1 and max(axis) <= limit) for axis, limit in zip(axes, limits, strict=True))
        if fits and (total is None or all(x * y * z <= total for x, y, z in rows)):
            continue
        for row, sizes in enumerate(rows):
            if not all(1 <= size <= limit for size, limit in zip(sizes, limits, strict=True)):
                raise invalid(f"{node_path(table, KERNEL, row)}.{name}", f"{sizes} is not within {limits}")
            if total is not None and prod(sizes) > total:
                raise invalid(f"{node_path(table, KERNEL, row)}.{name}", f"{sizes} are more than {total} in all")
    for row, (function, size) in enumerate(zip(table.function, table.block_size, strict=True)):
        if ends[function] > size:
            text = f"{size} bytes, the function's parameters end at {ends[function]}"
            raise invalid(f"{node_path(table, KERNEL, row)}.block", text)
    for row, (first, last) in enumerate(pairwise(table.attribute_bounds.tolist())):
        if first != last and (reason := _attributes_reason(table.attribute_id[first:last], LAUNCH_ATTRIBUTES)):
            raise invalid(f"{node_path(table, KERNEL, row)}.attributes", reason)
    values = table.attribute_value.tolist()
    if values and (min(values) < -(1 << 31) or max(values) >= 1 << 32):
        raise invalid(f"{table.where}: nodes.attributes", f"a value between {min(values)} and {max(values)} has more than 32 bits")


def _check_relocations(table: Table, sizes: list[int]) -> None:
    blocks = bytes(table.blocks)
    limits = table.relocation_bounds.tolist()
    rows = list(zip(table.relocation_at, table.relocation_memory, table.relocation_offset, strict=True))
    for kernel, (begin, size) in enumerate(zip(table.block_offset, table.block_size, strict=True)):
        free = 0
        for at, memory, offset in rows[limits[kernel] : limits[kernel + 1]]:
            if at < free or at + 8 > size:
                reason = f"8 bytes at {at}, expected between {free} and {size}, rising and apart"
            elif blocks[begin + at : begin + at + 8] != _ZERO:
                raise invalid(f"{node_path(table, KERNEL, kernel)}.block", f"the relocated word at {at} is not zero")
            elif offset >= sizes[memory] and (offset or sizes[memory]):
                reason = f"the word at {at} points at {outside(memory, offset, sizes)}"
            else:
                free = at + 8
                continue
            raise BundleError("relocation-invalid", f"{node_path(table, KERNEL, kernel)}.relocations: {reason}")


def _check_undefined(table: Table) -> None:
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
                field, reason = "undefined", f"{length} bytes at {offset}, expected between {free} and {size}, rising and apart"
            elif blocks.count(0, begin + offset, begin + offset + length) != length:
                field, reason = "block", f"the undefined bytes at {offset} are not zero"
            elif after < len(known) and known[after] < offset + length:
                field, reason = "undefined", f"the bytes at {offset} hold a relocation"
            else:
                free = offset + length
                continue
            raise invalid(f"{node_path(table, KERNEL, kernel)}.{field}", reason)


def _check_copies(table: Table, sizes: list[int]) -> None:
    for row in range(table.counts["memsets"]):
        element = table.memset_element[row]
        width, height, pitch = table.memset_width[row] * element, table.memset_height[row], table.memset_pitch[row]
        if element not in (1, 2, 4):
            raise invalid(f"{node_path(table, MEMSET, row)}.element", f"{element} bytes, expected 1, 2 or 4")
        reason = _extent_reason(table.memset_memory[row], table.memset_offset[row], (width, height, 1), (pitch, height), sizes)
        if reason:
            raise invalid(node_path(table, MEMSET, row), reason)
        if height > 1 and pitch % element:
            raise invalid(f"{node_path(table, MEMSET, row)}.pitch", f"{pitch} is no multiple of {element}")
    for row in range(table.counts["memcpys"]):
        width, height, depth = table.memcpy_extent[3 * row : 3 * row + 3]
        pitches = table.memcpy_pitch[4 * row : 4 * row + 4].tolist()
        for end, name in enumerate(("source", "target")):
            memory, offset = table.memcpy_memory[2 * row + end], table.memcpy_offset[2 * row + end]
            pitch, rows = pitches[2 * end : 2 * end + 2]
            if reason := _extent_reason(memory, offset, (width, height, depth), (pitch, rows), sizes):
                raise invalid(f"{node_path(table, MEMCPY, row)}.{name}", reason)


def _extent_reason(memory: int, offset: int, extent: tuple[int, int, int], pitches: tuple[int, int], sizes: list[int]) -> str:
    """Why the extent of a memset or memcpy is invalid, or "". `extent`: bytes x rows x slices; `pitches`: bytes per row, rows per
    slice."""
    width, height, depth = extent
    pitch, rows = pitches
    if not (width and height and depth):
        return f"{width} x {height} x {depth}: nothing to write"
    if (height > 1 or depth > 1) and pitch < width:
        return f"rows {pitch} bytes apart, each of {width}"
    if depth > 1 and rows < height:
        return f"slices {rows} rows apart, each of {height}"
    end = offset + ((depth - 1) * rows + height - 1) * pitch + width
    return f"ends at {outside(memory, end, sizes)}" if end > sizes[memory] else ""


def _check_edges(table: Table) -> None:
    columns = (table.edge_source, table.edge_target, table.edge_from_port, table.edge_to_port, table.edge_type)
    if any(any(column) for column in columns[2:]):
        for row, (source, target, out, into, kind) in enumerate(zip(*columns, strict=True)):
            path, kinds = f"{table.where}: edges[{row}]", (table.kind[source], table.kind[target])
            if kind not in (EDGE_DEFAULT, EDGE_PROGRAMMATIC) or into:
                raise invalid(path, f"type {kind}, to port {into}: not known")
            if out and (out not in (KERNEL_PORT_PROGRAMMATIC, KERNEL_PORT_LAUNCH_ORDER) or kinds[0] != KERNEL):
                raise invalid(f"{path}.from_port", f"{out} of a node of kind {kinds[0]}")
            if kind == EDGE_PROGRAMMATIC and not (out and kinds == (KERNEL, KERNEL)):
                raise invalid(f"{path}.type", f"programmatic, from port {out}, between nodes of kinds {kinds[0]} and {kinds[1]}")
    if len(set(zip(*columns, strict=True))) != table.counts["edges"]:
        raise invalid(f"{table.where}: edges", "one occurs twice")
    launch_order(table)


def node_path(table: Table, kind: int, row: int) -> str:
    """The path of the `row`-th node of a kind: `graphs/g0-8.bin: nodes[17]`."""
    position = -1
    kinds = bytes(table.kind)
    for _ in range(row + 1):
        position = kinds.index(kind, position + 1)
    return f"{table.where}: nodes[{position}]"


def outside(memory: int, offset: int, sizes: Sequence[int]) -> str:
    """Describes an invalid address. A size below 0: the bundle has no such memory."""
    if sizes[memory] < 0:
        return f"memory {MEMORIES[memory]}, which the bundle does not have"
    return f"byte {offset} of memory {MEMORIES[memory]}, which has {sizes[memory]}"
