"""Maps the memories of a program to the steps and nodes that use them: `inspect --memory`.  Pure functions.

A *place* is a range of memory that begins at an address which the program uses.  A recording does not contain the range's length,
but it ends at the latest where the next place begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .names import roles
from .nodes import READS, REFERS, WRITES, NodeRow

if TYPE_CHECKING:
    from cgbundle.format.schema import EntrySpec, Manifest, Program

DRAWN = ("state", "inputs", "arena", "host")
"""Memories that are drawn place by place.  Weights are only read, so one line suffices."""

LETTERS = {WRITES: "w", REFERS: "x", READS: "r"}
"""Letters for uses.  A column shows the first letter that applies."""

ROWS = 400
"""Maximum places of a program that are drawn."""


class Place(NamedTuple):
    """A range of a memory that nodes use.  `end`: at most the first byte after it; `name`: its contents, "" if unknown.

    `uses` maps the position of a node in the program to its use: WRITES, REFERS or READS, the first of these that applies."""

    memory: str
    begin: int
    end: int
    name: str
    uses: dict[int, str]


def order(steps: Sequence[Sequence[NodeRow]]) -> list[NodeRow]:
    """Returns all nodes of a program in order.  Their positions in this list are the columns of a map."""
    return [node for nodes in steps for node in nodes]


def places(manifest: Manifest, entry: EntrySpec, program: Program, nodes: Sequence[NodeRow]) -> list[Place]:
    """Returns the places of the memories in DRAWN, by memory and address.  A cpu program has none: its values are in memory of the
    caller, or allocated by its host region during a call."""
    if manifest.target.kind == "cpu":
        return []
    uses: dict[tuple[str, int], dict[int, str]] = {}
    labels: dict[tuple[str, int], list[str]] = {}
    for memory, begin, name in _places(manifest, entry, program):
        uses.setdefault((memory, begin), {})
        if name not in labels.setdefault((memory, begin), []):
            labels[memory, begin].append(name)
    for position, node in enumerate(nodes):
        for reference in node.references:
            if reference.memory in DRAWN:
                by_position = uses.setdefault((reference.memory, reference.offset), {})
                by_position[position] = min(by_position.get(position, READS), reference.how, key=list(LETTERS).index)
    sizes = dict(manifest.memories) | {"arena": program.arena, "inputs": program.static}
    rows = []
    for memory in DRAWN:
        begins = sorted(begin for where, begin in uses if where == memory)
        ends = [*begins[1:], max([sizes.get(memory, 0), *begins[-1:]])]
        for begin, end in zip(begins, ends, strict=False):  # without places there is one end but no begin
            rows.append(Place(memory, begin, end, ", ".join(labels.get((memory, begin), ())), uses[memory, begin]))
    return rows


def _places(manifest: Manifest, entry: EntrySpec, program: Program) -> Iterator[tuple[str, int, str]]:
    """Yields (memory, offset, name) of every value and every buffer of state."""
    role_names = roles(entry, program)
    for index, value in enumerate(program.values):
        if value.memory in DRAWN:
            yield value.memory, value.offset, role_names.get(index, f"v{index}")
    for weight in manifest.weights:
        if weight.memory == "state":
            yield "state", weight.offset, weight.name
