"""A list of nodes as text: what the terminal, the page and the DOT say of each.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..output import count, safe, size
from .nodes import HOWS, Node

if TYPE_CHECKING:
    from rich.table import Table as Shown

    from cgbundle.format.schema import Manifest, Program

LONG = ("kernel", "memory")
"""Columns that are cut where a terminal is narrow."""

DOTS = "..."


def axes(sizes: Sequence[int]) -> str:
    """`128x4`: (x, y, z) without the ones at the end; "" for none."""
    kept = list(sizes)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return "x".join(map(str, kept))


def waits(node: Node) -> str:
    """`3, 5`: what the node waits for; `3 early` where it may start before that one has ended."""
    return ", ".join([f"{number} early" if number in node.early else str(number) for number in node.after])


def memory(node: Node) -> str:
    """`reads token.weight, input ids; writes arena+0`."""
    parts = []
    for how in HOWS:
        found = [each.name for each in node.references if each.how == how]
        parts += [f"{how} {', '.join(found)}"] if found else []
    return "; ".join(parts)


def is_chain(nodes: Sequence[Node]) -> bool:
    """Whether every node waits for just the one before it."""
    before = [(), *[(node.number,) for node in nodes[:-1]]]
    return all(node.after == each and not node.early for node, each in zip(nodes, before, strict=True))


def heading(manifest: Manifest, program: Program, index: int, nodes: Sequence[Node]) -> list[str]:
    """`step 0, graph model: 22 nodes, each behind the one before (graphs/model-4.bin)`, and what a name in parentheses means."""
    step = program.steps[index]
    how = ", each behind the one before" if is_chain(nodes) and len(nodes) > 1 else ""
    lines = [f"step {index}, graph {manifest.regions[step.region].name}: {count(len(nodes), 'node')}{how} ({step.file})"]
    valued = any(each.name.endswith(")") for node in nodes for each in node.references)
    return [*lines, *(["(in parentheses: what lies at a place when the step begins or ends)"] if valued else [])]


def columns(nodes: Sequence[Node]) -> list[tuple[str, list[str]]]:
    """(head, cells) of the list of nodes; what is empty for all of them is left out."""
    found: list[tuple[str, Iterable[str]]] = [
        ("#", [str(node.number) for node in nodes]),
        ("after", map(waits, nodes) if not is_chain(nodes) else ()),
        ("kernel", [safe(node.what) for node in nodes]),
        ("grid", [axes(node.grid) for node in nodes]),
        ("cluster", [axes(node.cluster) for node in nodes]),
        ("block", [axes(node.block) for node in nodes]),
        ("shared", [size(node.shared) if node.shared else "" for node in nodes]),
        ("memory", [safe(memory(node)) for node in nodes]),
    ]
    made = [(head, list(cells)) for head, cells in found]
    return [(head, cells) for head, cells in made if any(cells)]


def fitted(found: list[tuple[str, list[str]]], width: int) -> list[tuple[str, list[str]]]:
    """The columns in lines of `width` characters: of kernels the middle is left out, since what tells two apart is at the end, of
    what they use the end."""
    spent = sum(max(map(len, [head, *cells])) + 2 for head, cells in found if head not in LONG)
    longest = {head: max(map(len, cells)) for head, cells in found if head in LONG}
    room = max(width - spent - 2, 40)
    kernel = min(longest.get("kernel", 0), max(room // 2, room - longest.get("memory", 0)))
    return [(head, [_cut(cell, head, kernel if head == "kernel" else room - kernel) for cell in cells]) for head, cells in found]


def _cut(cell: str, head: str, room: int) -> str:
    if head not in LONG or len(cell) <= room:
        return cell
    if head == "memory":
        return cell[: room - len(DOTS)] + DOTS
    tail = (room - len(DOTS)) * 2 // 3
    return cell[: room - len(DOTS) - tail] + DOTS + cell[-tail:]


def shown(found: list[tuple[str, list[str]]]) -> Shown:
    """A line per node."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head, _ in found:
        made.add_column(head, no_wrap=True, justify="right" if head in ("#", "shared") else "left", overflow="crop")
    for row in zip(*[cells for _, cells in found], strict=True):
        made.add_row(*row)
    return made
