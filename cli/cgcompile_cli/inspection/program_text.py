"""One program as text: steps, values and nodes, for the terminal, the page and DOT.  Pure functions."""

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
"""Columns that are truncated on a narrow terminal."""

DOTS = "..."


def axes(sizes: Sequence[int]) -> str:
    """Formats (x, y, z) without trailing ones: `128x4`; "" for ()."""
    trimmed = list(sizes)
    while len(trimmed) > 1 and trimmed[-1] == 1:
        trimmed.pop()
    return "x".join(map(str, trimmed))


def waits(node: NodeRow) -> str:
    """Formats the nodes that a node waits for: `3, 5`; `3 early` if it may start before node 3 has ended."""
    return ", ".join([f"{number} early" if number in node.early else str(number) for number in node.after])


def memory(node: NodeRow) -> str:
    """Formats the memory uses of a node: `reads token.weight, input ids; writes arena+0`."""
    parts = []
    for how in HOWS:
        names = [reference.name for reference in node.references if reference.how == how]
        parts += [f"{how} {', '.join(names)}"] if names else []
    return "; ".join(parts)


def is_chain(nodes: Sequence[NodeRow]) -> bool:
    """Returns whether every node waits only for the previous node."""
    expected = [(), *[(node.number,) for node in nodes[:-1]]]
    return all(node.after == previous and not node.early for node, previous in zip(nodes, expected, strict=True))


def heading(manifest: Manifest, program: Program, index: int, nodes: Sequence[NodeRow]) -> list[str]:
    """Returns `step 0, graph model: 22 nodes, each after the one before (graphs/model-4.bin)`, and a line about parentheses."""
    step = program.steps[index]
    order = ", each after the one before" if is_chain(nodes) and len(nodes) > 1 else ""
    lines = [f"step {index}, graph {manifest.regions[step.region].name}: {count(len(nodes), 'node')}{order} ({step.file})"]
    has_values = any(reference.name.endswith(")") for node in nodes for reference in node.references)
    return [*lines, *(["(in parentheses: what lies at a place when the step begins or ends)"] if has_values else [])]


def node_columns(nodes: Sequence[NodeRow]) -> list[tuple[str, list[str]]]:
    """Returns (head, cells) of the list of nodes, without empty columns."""
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
    """Truncates the columns to lines of `width` characters: kernel names in the middle, because they often differ at the end;
    memory at the end."""
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
    from rich.table import Table

    rich_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head, _ in columns:
        rich_table.add_column(head, no_wrap=True, justify="right" if head in ("#", "shared") else "left", overflow="crop")
    for row in zip(*[cells for _, cells in columns], strict=True):
        rich_table.add_row(*row)
    return rich_table


# --- steps and values ------------------------------------------------------------------------------------------------


def program_fields(manifest: Manifest, entry: EntrySpec, program: Program) -> list[Field]:
    """Returns int_key, memory, steps and values of one program."""
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
    role_names = roles(entry, program)
    return [
        (f"v{index}", value.dtype, list(value.shape), list(value.strides), value.memory, value.offset, role_names.get(index, ""))
        for index, value in enumerate(program.values)
    ]
