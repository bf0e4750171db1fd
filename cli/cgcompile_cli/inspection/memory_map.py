"""What lies where in the memories of a program, and which steps and nodes use it: `inspect --memory`.  Pure.

A *place* is an address that something of the program refers to.  A recording does not say how far it reaches: at the latest, it
ends where the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .names import roles
from .nodes import READS, REFERS, WRITES, NodeRow

if TYPE_CHECKING:
    from cgbundle.format.schema import EntrySpec, Manifest, Program

DRAWN = ("state", "inputs", "arena", "host")
"""Memories that are drawn place by place.  Of the weights, which are only read, a line is enough."""

LETTERS = {WRITES: "w", REFERS: "x", READS: "r"}
"""How a use is drawn; the first of these that holds for a column."""

ROWS = 400
"""Places of a program that are drawn: the rest is counted."""


class Place(NamedTuple):
    """`end` is the byte behind the place, at the most; `name` is what lies there, "" where that is not known.

    `uses` maps the position of a node in the program's order to READS, WRITES or REFERS; of several, the first in LETTERS."""

    memory: str
    begin: int
    end: int
    name: str
    uses: dict[int, str]


def order(steps: Sequence[Sequence[NodeRow]]) -> list[NodeRow]:
    """All nodes of a program in its order: their positions are the columns of a map."""
    return [node for nodes in steps for node in nodes]


def places(manifest: Manifest, entry: EntrySpec, program: Program, nodes: Sequence[NodeRow]) -> list[Place]:
    """The places of the memories in DRAWN, by memory and address.  A program of the cpu target has none: its values lie in memory
    that a call brings or its host region allocates."""
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
                known = uses.setdefault((reference.memory, reference.offset), {})
                known[position] = min(known.get(position, READS), reference.how, key=list(LETTERS).index)
    sizes = dict(manifest.memories) | {"arena": program.arena, "inputs": program.static}
    rows = []
    for memory in DRAWN:
        begins = sorted(begin for where, begin in uses if where == memory)
        ends = [*begins[1:], max([sizes.get(memory, 0), *begins[-1:]])]
        for begin, end in zip(begins, ends, strict=False):  # without places there is one end and no begin
            rows.append(Place(memory, begin, end, ", ".join(labels.get((memory, begin), ())), uses[memory, begin]))
    return rows


def _places(manifest: Manifest, entry: EntrySpec, program: Program) -> Iterator[tuple[str, int, str]]:
    """(memory, offset, name) of every value and every row of state."""
    named = roles(entry, program)
    for index, value in enumerate(program.values):
        if value.memory in DRAWN:
            yield value.memory, value.offset, named.get(index, f"v{index}")
    for weight in manifest.weights:
        if weight.memory == "state":
            yield "state", weight.offset, weight.name
