"""Kernels with a meaning to the runtime: those that set the condition of a conditional node, and those that exchange data between
ranks, by addresses of memory `peer`. All ranks have the same exchanges in the same order, because each waits for those of the other
ranks."""

from __future__ import annotations

from itertools import count, pairwise
from struct import Struct
from typing import NamedTuple

from ..errors import BundleError
from ..format.limits import BODY_DEPTH
from ..format.schema import MEMORIES, World
from ..format.table import CONDITIONAL, IF, KERNEL, SET_CONDITION, SWITCH, WHILE, Table, invalid

# --- exchanges between ranks ------------------------------------------------------------------------------------------

PEER = MEMORIES.index("peer")

INPUT, OUTPUT, FIRST_PEER = 0, 8, 16
"""Offsets in the parameter block: addresses of input and output, then of each rank's part of memory `peer`."""

_REST = Struct("<QIII")
"""After the addresses: bytes between the data of two ranks, pieces per rank, the kernel's rank, the sending ranks as bits."""


class Exchange(NamedTuple):
    """The part of a launch that is the same on every rank. `grid` and `threads` along x."""

    image: str
    symbol: str
    grid: int
    threads: int
    stride: int
    pieces: int
    senders: int


def params(world: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) of the kernel's parameters for `world` ranks."""
    places = [(8 * place, 8) for place in range(world + 3)]
    return tuple(places + [(8 * (world + 3) + 4 * place, 4) for place in range(3)])


def packed(world: int, stride: int, pieces: int, rank: int, senders: int) -> bytes:
    """A parameter block with zeros for addresses."""
    return bytes(FIRST_PEER + 8 * world) + _REST.pack(stride, pieces, rank, senders)


def unpacked(world: int, block: bytes) -> tuple[int, int, int, int]:
    numbers: tuple[int, int, int, int] = _REST.unpack_from(block, FIRST_PEER + 8 * world)
    return numbers


def exchanges(table: Table, world: World | None) -> list[Exchange]:
    """The exchanges of a checked table, in order. Raises table-invalid unless each has the parts of all ranks and the bundle's
    rank, none is in a branch or a loop, and the nodes of a table with exchanges run in sequence."""
    if PEER not in bytes(table.relocation_memory):
        return []
    bounds, launches, kernels = table.relocation_bounds.tolist(), [], count()
    for position, kind in enumerate(bytes(table.kind)):
        if kind != KERNEL:
            continue
        kernel = next(kernels)
        rows = range(bounds[kernel], bounds[kernel + 1])
        places = [(table.relocation_at[row], table.relocation_memory[row], table.relocation_offset[row]) for row in rows]
        if not any([memory == PEER for _, memory, _ in places]):
            continue
        where = f"{table.where}: nodes[{position}]"
        if world is None:
            raise BundleError("table-invalid", f"{where}: memory peer, in a bundle for one device")
        if table.graph(position):
            raise BundleError("table-invalid", f"{where}: an exchange between ranks in a branch or a loop")
        peers = [(FIRST_PEER + 8 * rank, PEER, rank * world.stride) for rank in range(world.size)]
        function = table.function[kernel]
        first, last = table.param_bounds[function], table.param_bounds[function + 1]
        layout = tuple(zip(table.param_offset[first:last], table.param_size[first:last], strict=True))
        known = layout == params(world.size) and [at for at, _, _ in places[:2]] == [INPUT, OUTPUT] and places[2:] == peers
        if not known or any([memory == PEER for _, memory, _ in places[:2]]):
            raise BundleError("table-invalid", f"{where}.relocations: not those of an exchange between {world.size} ranks")
        begin, size = table.block_offset[kernel], table.block_size[kernel]
        stride, pieces, rank, senders = unpacked(world.size, bytes(table.blocks[begin : begin + size]))
        if rank != world.rank:
            raise BundleError("table-invalid", f"{where}.block: of rank {rank}, the bundle is rank {world.rank}'s")
        shape = table.grid_x[kernel], table.threads_x[kernel]
        launches.append(Exchange(table.images[function], table.symbols[function], *shape, stride, pieces, senders))
    edges = sorted(zip(table.edge_source, table.edge_target, strict=True))
    if edges != list(pairwise(range(table.counts["nodes"]))):
        raise BundleError("table-invalid", f"{table.where}: edges: with exchanges between ranks the nodes run one after the other")
    return launches


# --- conditional nodes, their bodies and the kernels that set their conditions -------------------------------------------


PARAMS = [(0, 8), (8, 8)]
"""(offset, size) of the parameters of SET_CONDITION: the address of a byte, and the handle."""

BODIES = {IF: (1, 2), WHILE: (1, 1), SWITCH: (1, 256)}
"""Minimum and maximum number of bodies by type of the conditional node; a switch selects by a byte."""


def check_conditionals(table: Table) -> None:
    """Raises table-invalid unless every body belongs to one earlier node, and every condition is set. One kernel of the graph sets
    the condition directly before the node, one in a loop's body for the next iteration. No other kernel has the handle: its effect
    in another graph is undefined."""
    setters = _setters(table)
    nodes = [position for position, kind in enumerate(table.kind) if kind == CONDITIONAL]
    if not nodes and not setters:
        return
    homes = _bodies(table, nodes)
    before = set(zip(table.edge_source, table.edge_target, strict=True))
    for number, position in enumerate(nodes):
        where = f"{table.where}: nodes[{position}]"
        home, loop = table.graph(position), table.conditional_type[number] == WHILE
        by_graph: dict[int, list[int]] = {}
        for kernel, handle in setters:
            if handle == number:
                by_graph.setdefault(table.graph(kernel), []).append(kernel)
        expected = {home, *homes[number]} if loop else {home}
        if strays := sorted(set(by_graph) - expected):
            where = f"{table.where}: nodes[{by_graph[strays[0]][0]}].handles"
            raise invalid(where, f"sets the condition of node {position}, which is not of its graph")
        for graph in sorted(expected):
            if len(by_graph.get(graph, ())) != 1:
                what = "before it" if graph == home else "in its body"
                raise invalid(where, f"{len(by_graph.get(graph, ()))} kernels set its condition {what}, expected one")
        if (by_graph[home][0], position) not in before:
            raise invalid(where, f"no edge from node {by_graph[home][0]}, which sets its condition")


def _bodies(table: Table, nodes: list[int]) -> list[list[int]]:
    """For each conditional node, the graphs of its bodies."""
    if (listed := table.conditional_body.tolist()) != list(range(table.counts["bodies"])):
        raise invalid(f"{table.where}: nodes.bodies", f"{listed[:4]}..., expected each body once and in order")
    graphs = []
    depths = [0] * (table.counts["bodies"] + 1)
    for number, position in enumerate(nodes):
        where = f"{table.where}: nodes[{position}]"
        first, last = table.conditional_bounds[number : number + 2]
        fewest, most = BODIES[table.conditional_type[number]]
        if not fewest <= last - first <= most:
            raise invalid(f"{where}.bodies", f"{last - first}, expected {fewest} to {most}")
        home = table.graph(position)
        for body in range(first, last):
            if body + 1 <= home:
                reason = "holds the node itself" if body + 1 == home else "stands before it"
                raise invalid(f"{where}.bodies", f"body {body} {reason}")
            depths[body + 1] = depths[home] + 1
            if depths[body + 1] > BODY_DEPTH:
                raise invalid(f"{where}.bodies", f"more than {BODY_DEPTH} inside each other")
        graphs.append([body + 1 for body in range(first, last)])
    return graphs


def _setters(table: Table) -> list[tuple[int, int]]:
    """(position, conditional node) of every kernel that sets a condition."""
    symbols = {row for row, symbol in enumerate(table.symbols) if symbol == SET_CONDITION}
    for row in symbols:
        bounds = slice(table.param_bounds[row], table.param_bounds[row + 1])
        if list(zip(table.param_offset[bounds], table.param_size[bounds], strict=True)) != PARAMS:
            raise invalid(f"{table.where}: functions[{row}].params", f"of {SET_CONDITION}: expected {PARAMS}")
    columns = zip(table.handle_kernel, table.handle_at, table.handle_conditional, strict=True)
    handles = {kernel: (at, number) for kernel, at, number in columns}
    if len(handles) != table.counts["handles"]:
        raise invalid(f"{table.where}: nodes.handles", "a kernel has two handles")
    setters = []
    kernels = [position for position, kind in enumerate(table.kind) if kind == KERNEL]
    axes = (table.grid_x, table.grid_y, table.grid_z, table.threads_x, table.threads_y, table.threads_z)
    for row, (function, position) in enumerate(zip(table.function, kernels, strict=True)):
        where = f"{table.where}: nodes[{position}]"
        if (function in symbols) != (row in handles):
            what = "sets a condition without a handle" if function in symbols else f"has a handle and is not {SET_CONDITION}"
            raise invalid(f"{where}.handles", what)
        if row not in handles:
            continue
        begin, (at, number) = table.block_offset[row], handles[row]
        if at != PARAMS[1][0] or table.block_size[row] != 16 or any(table.blocks[begin : begin + 16]):
            raise invalid(f"{where}.handles", f"the handle at byte {at}, expected at {PARAMS[1][0]} of 16 bytes of zeros")
        if table.relocation_at[slice(*table.relocation_bounds[row : row + 2])].tolist() != [PARAMS[0][0]]:
            raise invalid(f"{where}.relocations", "expected the byte's address alone, at 0")
        if (sizes := [axis[row] for axis in axes]) != [1] * 6:
            raise invalid(f"{where}.grid", f"{sizes}, expected a single thread")
        if table.undefined_bounds[row] != table.undefined_bounds[row + 1]:
            raise invalid(f"{where}.undefined", "expected none")
        setters.append((position, number))
    return setters
