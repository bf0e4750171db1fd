"""Recordings <-> bytes, exact inverses: bytes that `decode` accepts are what `encode` makes of the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from cgbundle.tables.column_file import Data, bounds, invalid, pack
from cgbundle.tables.module_state import relocation_columns, symbol_columns
from cgbundle.tables.recording import (
    TYPES,
    Address,
    ConditionalNode,
    Edge,
    EmptyNode,
    Function,
    Handle,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    Recording,
    Relocation,
)
from cgbundle.tables.table import BRANCHING, CONDITIONAL, EMPTY, KERNEL, MEMCPY, MEMSET, RECORDING, Table

MEMSET_FIELDS = ("value", "element", "width", "height", "pitch")
EXTENT_FIELDS = ("width", "height", "depth")
PITCH_FIELDS = ("source_pitch", "source_height", "target_pitch", "target_height")
EDGE_FIELDS = ("source", "target", "from_port", "to_port", "type")
"""Fields by their names: of a memset and of an edge each is a column, of a memcpy they share one."""


def encode(recording: Recording) -> bytes:
    """The bytes of `graphs/*.bin`.  Raises table-invalid where a field has no place in the format."""
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
    """The recording in `data`.  Raises table-invalid unless its structure is sound."""
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
    rows = [count() for _ in _READERS]  # the next row of each kind
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
    own = slice(*table.conditional_bounds[row : row + 2])
    return ConditionalNode(type=TYPES[table.conditional_type[row]], bodies=tuple(table.conditional_body[own]))


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
