"""Recordings of graphs with the parameters of every node, and their encoding as bytes.  Both recorders of GPU programs create them.

`encode` and `decode` are exact inverses: if `decode` accepts bytes, `encode` of the result returns the same bytes.  The runtime
reads the columns directly (cgbundle/format/table.py), without these classes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any

from cgbundle.format.schema import IntKey
from cgbundle.format.table import (
    BRANCHING,
    CONDITIONAL,
    EMPTY,
    KERNEL,
    MEMCPY,
    MEMSET,
    RECORDING,
    Data,
    Layout,
    Table,
    check_counts,
    check_length,
    column_bytes,
    invalid,
)
from cgbundle.validate.module_state import STATES, Address, ModuleState, Relocation


@dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """A place for the handle of a conditional node: 8 bytes at offset `at` of a kernel's parameter block.  `conditional` is the
    number of the node among the conditional nodes.  The driver creates the handle with the graph."""

    at: int
    conditional: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A kernel in an image, identified by the SHA-256 of the image and the symbol.  `params` is (offset, size) of each parameter,
    as the driver reports them.  `attributes` are CUfunction_attribute numbers and values to set before use (dynamic shared memory,
    carve-out, non-portable cluster size)."""

    image: str
    symbol: str
    params: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelNode:
    """A kernel launch.  `block` is the parameter block; its undefined bytes and relocated words are zero.  `undefined` lists
    (offset, size) of bytes that no kernel reads.  `attributes` are CUlaunchAttributeID numbers with up to three values.  Only a
    launch of SET_CONDITION has `handles`."""

    function: int
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    block: bytes
    relocations: tuple[Relocation, ...]
    undefined: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, tuple[int, int, int]], ...]
    handles: tuple[Handle, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemsetNode:
    """Sets `height` rows of `width` elements to `value`.  `element` is the size of an element, `pitch` that of a row, in bytes."""

    target: Address
    value: int
    element: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemcpyNode:
    """Copies `width` bytes x `height` rows x `depth` slices, device to device.  Pitches are in bytes, heights in rows."""

    source: Address
    target: Address
    width: int
    height: int
    depth: int
    source_pitch: int
    source_height: int
    target_pitch: int
    target_height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EmptyNode:
    """A node without work, which only orders other nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionalNode:
    """A branch or a loop on the device.  `bodies` are positions in `Recording.bodies`.

    "if": runs the first body if the condition is true, else the second, if there is one.  "while": runs the only body as long as
    the condition is true, which it tests before each iteration.  "switch": the condition is the number of the body to run, from 0.
    If there is no such body, nothing runs.  Launches of SET_CONDITION, before the node and in a loop's body, set the condition.
    """

    type: str
    bodies: tuple[int, ...]


Node = KernelNode | MemsetNode | MemcpyNode | EmptyNode | ConditionalNode

TYPES = ("if", "while", "switch")
"""Types of conditional nodes, in the order of their numbers in the column `conditional_type`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """Orders node `source` before node `target`, with the driver's edge data (for programmatic dependent launch)."""

    source: int
    target: int
    from_port: int
    to_port: int
    type: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A graph region at one int_key.  `bodies` has the position in `nodes` of the first node of each conditional body.  A body ends
    where the next one begins.  The nodes before the first body belong to the graph itself.  An edge connects nodes of the same
    graph or body."""

    key: IntKey
    functions: tuple[Function, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    bodies: tuple[int, ...] = ()


# --- bytes ----------------------------------------------------------------------------------------------------------

MEMSET_FIELDS = ("value", "element", "width", "height", "pitch")
EXTENT_FIELDS = ("width", "height", "depth")
PITCH_FIELDS = ("source_pitch", "source_height", "target_pitch", "target_height")
EDGE_FIELDS = ("source", "target", "from_port", "to_port", "type")
"""Names of fields.  Memsets and edges have a column per field.  A memcpy has a column for its extents and one for its pitches."""


def encode(recording: Recording) -> bytes:
    """Returns the bytes of `graphs/*.bin`.  Raises table-invalid if the format cannot hold a field."""
    functions, nodes, edges = recording.functions, recording.nodes, recording.edges
    kernels = [node for node in nodes if isinstance(node, KernelNode)]
    memsets = [node for node in nodes if isinstance(node, MemsetNode)]
    memcpys = [node for node in nodes if isinstance(node, MemcpyNode)]
    conditionals = [node for node in nodes if isinstance(node, ConditionalNode)]
    handles = [(row, item) for row, node in enumerate(kernels) for item in node.handles]
    params = [pair for function in functions for pair in function.params]
    settings = [pair for function in functions for pair in function.attributes]
    relocations = [item for node in kernels for item in node.relocations]
    undefined = [item for node in kernels for item in node.undefined]
    attributes = [item for node in kernels for item in node.attributes]
    blocks = b"".join(node.block + bytes(-len(node.block) % 8) for node in kernels)
    columns = {
        "key": recording.key,
        **symbol_columns(functions),
        "param_bounds": bounds(len(function.params) for function in functions),
        "function_attribute_bounds": bounds(len(function.attributes) for function in functions),
        "param_offset": [offset for offset, _ in params],
        "param_size": [size for _, size in params],
        "function_attribute_id": [number for number, _ in settings],
        "function_attribute_value": [value for _, value in settings],
        "kind": [_KINDS[type(node)] for node in nodes],
        "function": [node.function for node in kernels],
        **_axes("grid", [node.grid for node in kernels]),
        **_axes("threads", [node.threads for node in kernels]),
        "shared": [node.shared for node in kernels],
        "block_offset": bounds(len(node.block) + -len(node.block) % 8 for node in kernels)[:-1],
        "block_size": [len(node.block) for node in kernels],
        "relocation_bounds": bounds(len(node.relocations) for node in kernels),
        "undefined_bounds": bounds(len(node.undefined) for node in kernels),
        "attribute_bounds": bounds(len(node.attributes) for node in kernels),
        **relocation_columns(relocations),
        "undefined_offset": [offset for offset, _ in undefined],
        "undefined_size": [size for _, size in undefined],
        "attribute_id": [number for number, _ in attributes],
        "attribute_value": [value for _, values in attributes for value in values],
        "memset_memory": [node.target.memory for node in memsets],
        "memset_offset": [node.target.offset for node in memsets],
        **{f"memset_{name}": [getattr(node, name) for node in memsets] for name in MEMSET_FIELDS},
        "memcpy_memory": [place.memory for node in memcpys for place in (node.source, node.target)],
        "memcpy_offset": [place.offset for node in memcpys for place in (node.source, node.target)],
        "memcpy_extent": [getattr(node, name) for node in memcpys for name in EXTENT_FIELDS],
        "memcpy_pitch": [getattr(node, name) for node in memcpys for name in PITCH_FIELDS],
        **{f"edge_{name}": [getattr(edge, name) for edge in edges] for name in EDGE_FIELDS},
        "blocks": blocks,
        "conditional_type": [TYPES.index(node.type) for node in conditionals],
        "conditional_bounds": bounds(len(node.bodies) for node in conditionals),
        "conditional_body": [body for node in conditionals for body in node.bodies],
        "body_begin": recording.bodies,
        "handle_kernel": [row for row, _ in handles],
        "handle_at": [item.at for _, item in handles],
        "handle_conditional": [item.conditional for _, item in handles],
    }
    counts = {
        "keys": len(recording.key), "functions": len(functions), "params": len(params), "function_attributes": len(settings),
        "symbol_bytes": len(columns["symbols"]), "nodes": len(nodes), "kernels": len(kernels), "relocations": len(relocations),
        "undefined": len(undefined), "attributes": len(attributes), "memsets": len(memsets), "memcpys": len(memcpys),
        "edges": len(edges), "block_bytes": len(blocks), "conditionals": len(conditionals), "bodies": len(recording.bodies),
        "handles": len(handles),
    }  # fmt: skip
    if not conditionals and (recording.bodies or handles):
        raise invalid("nodes", "bodies or handles without a conditional node")
    layout = BRANCHING if conditionals else RECORDING
    return pack(layout, {name: counts[name] for name in layout.counts}, columns)


def decode(data: Data, where: str = "table") -> Recording:
    """Returns the recording in `data`.  Raises table-invalid if its structure is invalid."""
    table = Table(data, where)
    return Recording(
        key=tuple(table.key),
        functions=tuple(_function(table, row) for row in range(table.counts["functions"])),
        nodes=_nodes(table),
        edges=tuple(
            Edge(**{name: getattr(table, f"edge_{name}")[row] for name in EDGE_FIELDS}) for row in range(table.counts["edges"])
        ),
        bodies=tuple(table.body_begin),
    )


def _function(table: Table, row: int) -> Function:
    params = slice(*table.param_bounds[row : row + 2])
    settings = slice(*table.function_attribute_bounds[row : row + 2])
    return Function(
        image=table.images[row],
        symbol=table.symbols[row],
        params=tuple(zip(table.param_offset[params], table.param_size[params], strict=True)),
        attributes=tuple(zip(table.function_attribute_id[settings], table.function_attribute_value[settings], strict=True)),
    )


def _nodes(table: Table) -> tuple[Node, ...]:
    handles: dict[int, list[Handle]] = {}
    for kernel, at, conditional in zip(table.handle_kernel, table.handle_at, table.handle_conditional, strict=True):
        handles.setdefault(kernel, []).append(Handle(at=at, conditional=conditional))
    rows = [count() for _ in _READERS]  # counts the rows of each kind
    nodes = [_READERS[kind](table, next(rows[kind])) for kind in table.kind]
    kernels = enumerate([node for node in nodes if isinstance(node, KernelNode)]) if handles else ()
    changed = {id(node): replace(node, handles=tuple(handles[row])) for row, node in kernels if row in handles}
    return tuple([changed.get(id(node), node) for node in nodes])


def _kernel(table: Table, row: int) -> KernelNode:
    undefined, relocated = slice(*table.undefined_bounds[row : row + 2]), slice(*table.relocation_bounds[row : row + 2])
    relocations = zip(
        table.relocation_at[relocated], table.relocation_memory[relocated], table.relocation_offset[relocated], strict=True
    )
    first, last = table.attribute_bounds[row : row + 2]
    values = table.attribute_value
    begin = table.block_offset[row]
    return KernelNode(
        function=table.function[row],
        grid=(table.grid_x[row], table.grid_y[row], table.grid_z[row]),
        threads=(table.threads_x[row], table.threads_y[row], table.threads_z[row]),
        shared=table.shared[row],
        block=bytes(table.blocks[begin : begin + table.block_size[row]]),
        relocations=tuple(Relocation(at=at, target=Address(memory=memory, offset=offset)) for at, memory, offset in relocations),
        undefined=tuple(zip(table.undefined_offset[undefined], table.undefined_size[undefined], strict=True)),
        attributes=tuple(
            (table.attribute_id[i], (values[3 * i], values[3 * i + 1], values[3 * i + 2])) for i in range(first, last)
        ),
    )


def _memset(table: Table, row: int) -> MemsetNode:
    return MemsetNode(
        target=Address(memory=table.memset_memory[row], offset=table.memset_offset[row]),
        **{name: getattr(table, f"memset_{name}")[row] for name in MEMSET_FIELDS},
    )


def _memcpy(table: Table, row: int) -> MemcpyNode:
    return MemcpyNode(
        source=Address(memory=table.memcpy_memory[2 * row], offset=table.memcpy_offset[2 * row]),
        target=Address(memory=table.memcpy_memory[2 * row + 1], offset=table.memcpy_offset[2 * row + 1]),
        **dict(zip(EXTENT_FIELDS, table.memcpy_extent[3 * row : 3 * row + 3], strict=True)),
        **dict(zip(PITCH_FIELDS, table.memcpy_pitch[4 * row : 4 * row + 4], strict=True)),
    )


def _conditional(table: Table, row: int) -> ConditionalNode:
    body_span = slice(*table.conditional_bounds[row : row + 2])
    return ConditionalNode(type=TYPES[table.conditional_type[row]], bodies=tuple(table.conditional_body[body_span]))


_KINDS: dict[type, int] = {
    EmptyNode: EMPTY,
    KernelNode: KERNEL,
    MemsetNode: MEMSET,
    MemcpyNode: MEMCPY,
    ConditionalNode: CONDITIONAL,
}
_READERS = (lambda table, row: EmptyNode(), _kernel, _memset, _memcpy, _conditional)


def _axes(name: str, sizes: Iterable[tuple[int, int, int]]) -> dict[str, list[int]]:
    rows = list(sizes)
    return {f"{name}_{axis}": [row[i] for row in rows] for i, axis in enumerate("xyz")}


def encode_states(states: Sequence[ModuleState]) -> bytes:
    """Returns the bytes of `graphs/modules.bin`, in the order of `states`.  Raises table-invalid if a field does not fit."""
    relocations = [item for state in states for item in state.relocations]
    contents = b"".join(state.contents for state in states)
    columns = {
        **symbol_columns(states),
        "content_bounds": bounds(len(state.contents) for state in states),
        "relocation_bounds": bounds(len(state.relocations) for state in states),
        **relocation_columns(relocations),
        "contents": contents,
    }
    sizes = len(states), len(relocations), len(columns["symbols"]), len(contents)
    return pack(STATES, dict(zip(STATES.counts, sizes, strict=True)), columns)


def symbol_columns(rows: Sequence[ModuleState | Function]) -> dict[str, Any]:
    """Returns the columns of symbols and images, which both kinds of file have.  Raises table-invalid."""
    try:
        names = [row.symbol.encode() for row in rows]
    except UnicodeEncodeError as error:
        raise invalid(f"symbol {error.object[:80]!r}", "not UTF-8") from None
    return {"symbol_bounds": bounds(map(len, names)), "symbols": b"".join(names), "image": b"".join(map(_image_bytes, rows))}


def _image_bytes(row: ModuleState | Function) -> bytes:
    try:
        data = bytes.fromhex(row.image)
    except ValueError:
        data = b""
    if len(data) != 32 or data.hex() != row.image:
        raise invalid(f"image {row.image[:80]!r}", "expected a SHA-256 of 64 lower-case digits")
    return data


def relocation_columns(relocations: Sequence[Relocation]) -> dict[str, list[int]]:
    """Returns the columns of relocations, which both kinds of file have."""
    return {
        "relocation_at": [item.at for item in relocations],
        "relocation_memory": [item.target.memory for item in relocations],
        "relocation_offset": [item.target.offset for item in relocations],
    }


def pack(layout: Layout, counts: Mapping[str, int], contents: Mapping[str, Data | Iterable[int]]) -> bytes:
    """Returns the bytes of a file.  Raises table-invalid if a number does not fit its column, or the file exceeds the limits."""
    check_counts(counts, "table")
    out = bytearray(layout.header)
    for column in layout.columns:
        content = contents[column.name]
        if isinstance(content, (bytes, bytearray, memoryview)):
            data = bytes(content)
        else:
            try:
                data = array(column.format, content).tobytes()
            except (OverflowError, TypeError) as error:
                raise invalid(column.name, str(error)) from None
        if len(data) != column_bytes(column, counts):
            raise invalid(column.name, f"{len(data)} bytes, expected {column_bytes(column, counts)}")
        out += data
        out += bytes(-len(data) % 8)
    check_length(len(out), "table")
    words = array("Q", [layout.version, len(out), *(counts[name] for name in layout.counts)])
    out[: layout.header] = layout.magic + words.tobytes()
    return bytes(out)


def bounds(lengths: Iterable[int]) -> list[int]:
    """Returns the starts of rows of these lengths, and the end of the last row."""
    return list(accumulate(lengths, initial=0))
