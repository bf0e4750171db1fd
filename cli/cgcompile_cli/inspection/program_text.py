"""One program as text: its steps, values and nodes, on the terminal, the page and in DOT.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cgbundle.self_test import name_key

from ..output import count, listed, safe, size, table
from .names import roles
from .nodes import HOWS, NodeRow

if TYPE_CHECKING:
    from rich.table import Table

    from cgbundle.format.schema import EntrySpec, Manifest, Program

    from ..output import Field

LONG = ("kernel", "memory")
"""Columns that are cut where a terminal is narrow."""

DOTS = "..."


def axes(sizes: Sequence[int]) -> str:
    """`128x4`: (x, y, z) without the ones at the end; "" for none."""
    kept = list(sizes)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return "x".join(map(str, kept))


def waits(node: NodeRow) -> str:
    """`3, 5`: what the node waits for; `3 early` where it may start before node 3 has ended."""
    return ", ".join([f"{number} early" if number in node.early else str(number) for number in node.after])


def memory(node: NodeRow) -> str:
    """`reads token.weight, input ids; writes arena+0`."""
    parts = []
    for how in HOWS:
        names = [reference.name for reference in node.references if reference.how == how]
        parts += [f"{how} {', '.join(names)}"] if names else []
    return "; ".join(parts)


def is_chain(nodes: Sequence[NodeRow]) -> bool:
    """Whether every node waits for just the one before it."""
    before = [(), *[(node.number,) for node in nodes[:-1]]]
    return all(node.after == previous and not node.early for node, previous in zip(nodes, before, strict=True))


def heading(manifest: Manifest, program: Program, index: int, nodes: Sequence[NodeRow]) -> list[str]:
    """`step 0, graph model: 22 nodes, each behind the one before (graphs/model-4.bin)`, and what a name in parentheses means."""
    step = program.steps[index]
    how = ", each behind the one before" if is_chain(nodes) and len(nodes) > 1 else ""
    lines = [f"step {index}, graph {manifest.regions[step.region].name}: {count(len(nodes), 'node')}{how} ({step.file})"]
    valued = any(reference.name.endswith(")") for node in nodes for reference in node.references)
    return [*lines, *(["(in parentheses: what lies at a place when the step begins or ends)"] if valued else [])]


def node_columns(nodes: Sequence[NodeRow]) -> list[tuple[str, list[str]]]:
    """(head, cells) of the list of nodes; what is empty for all of them is left out."""
    columns: list[tuple[str, Iterable[str]]] = [
        ("#", [str(node.number) for node in nodes]),
        ("after", map(waits, nodes) if not is_chain(nodes) else ()),
        ("body", [str(node.body) if node.depth else "" for node in nodes]),
        ("kernel", ["  " * node.depth + safe(node.what) for node in nodes]),
        ("grid", [axes(node.grid) for node in nodes]),
        ("cluster", [axes(node.cluster) for node in nodes]),
        ("block", [axes(node.block) for node in nodes]),
        ("shared", [size(node.shared) if node.shared else "" for node in nodes]),
        ("memory", [safe(memory(node)) for node in nodes]),
    ]
    full_columns = [(head, list(cells)) for head, cells in columns]
    return [(head, cells) for head, cells in full_columns if any(cells)]


def fitted(columns: list[tuple[str, list[str]]], width: int) -> list[tuple[str, list[str]]]:
    """The columns in lines of `width` characters: of kernels the middle is left out, since two differ at the end; of memory the
    end."""
    spent = sum(max(map(len, [head, *cells])) + 2 for head, cells in columns if head not in LONG)
    longest = {head: max(map(len, cells)) for head, cells in columns if head in LONG}
    space = max(width - spent - 2, 40)
    kernel = min(longest.get("kernel", 0), max(space // 2, space - longest.get("memory", 0)))
    return [(head, [_cut(cell, head, kernel if head == "kernel" else space - kernel) for cell in cells]) for head, cells in columns]


def _cut(cell: str, head: str, space: int) -> str:
    if head not in LONG or len(cell) <= space:
        return cell
    if head == "memory":
        return cell[: space - len(DOTS)] + DOTS
    tail = (space - len(DOTS)) * 2 // 3
    return cell[: space - len(DOTS) - tail] + DOTS + cell[-tail:]


def node_table(columns: list[tuple[str, list[str]]]) -> Table:
    """A line per node."""
    from rich.table import Table

    rich_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head, _ in columns:
        rich_table.add_column(head, no_wrap=True, justify="right" if head in ("#", "shared") else "left", overflow="crop")
    for row in zip(*[cells for _, cells in columns], strict=True):
        rich_table.add_row(*row)
    return rich_table


# --- steps and values ------------------------------------------------------------------------------------------------


def program_fields(manifest: Manifest, entry: EntrySpec, program: Program) -> list[Field]:
    """The int_key, memory, steps and values of one program."""
    return [
        ("int_key", name_key(entry, program.key)),
        ("memory", f"arena {size(program.arena)}, inputs {size(program.static)}"),
        ("steps", table((">", "", "region", "reads", "writes", "file"), _steps(manifest, program))),
        ("values", table((">", "", "", "strides", "memory", ">offset", ""), _values(entry, program))),
    ]


def _steps(manifest: Manifest, program: Program) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for index, step in enumerate(program.steps):
        name, file = "", ""
        if step.kind != "copy":
            region = manifest.regions[step.region]
            name, file = region.name, step.file or region.file
        reads, writes = (listed([f"v{value}" for value in values], 4) for values in (step.inputs, step.outputs))
        rows.append((index, step.kind, name, reads, writes, file))
    return rows


def _values(entry: EntrySpec, program: Program) -> list[tuple[Any, ...]]:
    named = roles(entry, program)
    return [
        (f"v{index}", value.dtype, list(value.shape), list(value.strides), value.memory, value.offset, named.get(index, ""))
        for index, value in enumerate(program.values)
    ]
