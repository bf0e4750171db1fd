"""Every invariant of a recording's conditional nodes, their bodies and the kernels that set their conditions."""

from __future__ import annotations

from ..format.limits import BODY_DEPTH
from ..tables.table import CONDITIONAL, IF, KERNEL, SET_CONDITION, SWITCH, WHILE, Table, invalid

PARAMS = [(0, 8), (8, 8)]
"""(offset, size) of the parameters of SET_CONDITION: the address of a byte, and the handle."""

BODIES = {IF: (1, 2), WHILE: (1, 1), SWITCH: (1, 256)}
"""Type of a conditional node -> the fewest and the most bodies: a byte tells those of a switch apart."""


def check_conditionals(table: Table) -> None:
    """Raises table-invalid unless every body belongs to one earlier node, and every condition is set where it counts.

    Of the graph that holds a conditional node one kernel sets its condition, directly before the node; of a loop's body one does
    for the next turn.  No other kernel has its handle: what a handle of another graph does is not defined.
    """
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
            raise invalid(
                f"{table.where}: nodes[{by_graph[strays[0]][0]}].handles",
                f"sets the condition of node {position}, which is not of its graph",
            )
        for graph in sorted(expected):
            if len(by_graph.get(graph, ())) != 1:
                what = "before it" if graph == home else "in its body"
                raise invalid(where, f"{len(by_graph.get(graph, ()))} kernels set its condition {what}, expected one")
        if (by_graph[home][0], position) not in before:
            raise invalid(where, f"no edge from node {by_graph[home][0]}, which sets its condition")


def _bodies(table: Table, nodes: list[int]) -> list[list[int]]:
    """Of every conditional node the graphs of its bodies."""
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
                raise invalid(
                    f"{where}.bodies", f"body {body} holds the node itself" if body + 1 == home else f"body {body} stands before it"
                )
            depths[body + 1] = depths[home] + 1
            if depths[body + 1] > BODY_DEPTH:
                raise invalid(f"{where}.bodies", f"more than {BODY_DEPTH} inside each other")
        graphs.append([body + 1 for body in range(first, last)])
    return graphs


def _setters(table: Table) -> list[tuple[int, int]]:
    """(position, conditional node) of every kernel that sets a condition, which does nothing else."""
    symbols = {row for row, symbol in enumerate(table.symbols) if symbol == SET_CONDITION}
    if not symbols and not table.counts["handles"]:
        return []
    for row in symbols:
        bounds = slice(table.param_bounds[row], table.param_bounds[row + 1])
        if list(zip(table.param_offset[bounds], table.param_size[bounds], strict=True)) != PARAMS:
            raise invalid(f"{table.where}: functions[{row}].params", f"of {SET_CONDITION}: expected {PARAMS}")
    handles = {
        kernel: (at, number)
        for kernel, at, number in zip(table.handle_kernel, table.handle_at, table.handle_conditional, strict=True)
    }
    if len(handles) != table.counts["handles"]:
        raise invalid(f"{table.where}: nodes.handles", "two of one kernel")
    setters = []
    kernels = [position for position, kind in enumerate(table.kind) if kind == KERNEL]
    for row, (function, position) in enumerate(zip(table.function, kernels, strict=True)):
        if (function in symbols) != (row in handles):
            what = "sets a condition without a handle" if function in symbols else f"has a handle and is not {SET_CONDITION}"
            raise invalid(f"{table.where}: nodes[{position}].handles", what)
        if row in handles:
            _check_setter(table, row, position, handles[row][0])
            setters.append((position, handles[row][1]))
    return setters


def _check_setter(table: Table, row: int, position: int, at: int) -> None:
    where = f"{table.where}: nodes[{position}]"
    first, last = table.relocation_bounds[row : row + 2]
    begin = table.block_offset[row]
    if at != PARAMS[1][0] or table.block_size[row] != 16 or any(table.blocks[begin : begin + 16]):
        raise invalid(f"{where}.handles", f"the handle at byte {at}, expected at {PARAMS[1][0]} of 16 bytes of zeros")
    if table.relocation_at[first:last].tolist() != [PARAMS[0][0]]:
        raise invalid(f"{where}.relocations", "expected the byte's address alone, at 0")
    sizes = [axis[row] for axis in (table.grid_x, table.grid_y, table.grid_z, table.threads_x, table.threads_y, table.threads_z)]
    if sizes != [1] * 6:
        raise invalid(f"{where}.grid", f"{sizes}, expected a single thread")
    if table.undefined_bounds[row] != table.undefined_bounds[row + 1]:
        raise invalid(f"{where}.undefined", "expected none")
