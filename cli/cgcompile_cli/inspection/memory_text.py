"""Maps of memory as text: `inspect --memory`.  Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cgbundle.format.shapes import span
from cgbundle.self_test import name_key

from ..int_keys import spell
from ..output import count, record, shortened, size, table
from .memory_map import LETTERS, ROWS, Place, order
from .nodes import NodeRow

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cgbundle.format.schema import EntrySpec, Manifest, Program

BETWEEN = "-"
SHADES = " .:=+*#@"
"""Characters for the number of nodes that use a part of the arena, from none to the most."""

LEGEND = "w written, r read, x one or both, - between the first and the last use"


def one_program(
    entry: EntrySpec, program: Program, steps: Sequence[Sequence[NodeRow]], places: Sequence[Place], columns: int
) -> tuple[RenderableType, ...]:
    """Shows the uses of every place of one program's memory, by step."""
    total = sum(map(len, steps))
    texts = list(rows(places, total, 0))
    spent = sum(max([len(text[column]) for text in texts]) + 2 for column in range(3))
    width = max(20, columns - spent)
    per_column = max(1, -(-total // width))
    scale = f"{total} nodes and steps in order, {'one' if per_column == 1 else per_column} a column"
    head = record([("int_key", name_key(entry, program.key)), ("columns", [scale, LEGEND])])
    drawn: list[tuple[str, ...]] = []
    if len(steps) > 1:
        drawn.append(("", "", "steps", timeline(program, steps, width)))
    drawn += rows(places, total, width)
    return head, table(("place", ">up to", "", ruler(total, width)), drawn)


def all_programs(
    manifest: Manifest,
    entry: EntrySpec,
    programs: Sequence[tuple[Program, Sequence[Sequence[NodeRow]], Sequence[Place]]],
    columns: int,
) -> tuple[RenderableType, ...]:
    """Shows a line per program of `entry`: its memory, and how many nodes use each part of the arena."""
    arena_bytes = dict(manifest.memories).get("arena", 0)
    heads = (" x ".join([dimension.name for dimension in entry.dimensions]) or "int_key", ">arena", ">inputs", ">nodes")
    lines = [
        (spell(program.key), size(program.arena), size(program.static), str(sum(map(len, steps)))) for program, steps, _ in programs
    ]
    spent = sum(max(len(head.strip(">")), *[len(row[column]) for row in lines]) + 2 for column, head in enumerate(heads))
    width = max(20, columns - spent - 2)
    scale = f"|0{size(arena_bytes).rjust(width - 1)}|"
    drawn = [
        (*row, f"|{shades(places, 'arena', arena_bytes, program.arena, width).ljust(width)}|")
        for row, (program, _, places) in zip(lines, programs, strict=True)
    ]
    legend = [
        f"nodes that use a part of the arena: {SHADES[1]} one, then twice as many each:{SHADES}",
        "all int_keys share one arena; --graph KEY --memory draws one of them in full",
    ]
    return table((*heads, scale), drawn), record([("", legend)])


def uses_strip(uses: dict[int, str], total: int, width: int) -> str:
    """Draws the uses of a place by `total` nodes in order, in at most `width` characters."""
    step = max(1, -(-total // max(width, 1)))
    cells = [" "] * -(-total // step)
    if uses:
        for cell in range(min(uses) // step, max(uses) // step + 1):
            cells[cell] = BETWEEN
    for how in reversed(LETTERS):
        for position, use in uses.items():
            if use == how:
                cells[position // step] = LETTERS[how]
    return "".join(cells).rstrip()


def ruler(total: int, width: int) -> str:
    """Draws positions above the cells of `uses_strip`: `0         10        20`."""
    step = max(1, -(-total // max(width, 1)))
    line = ""
    for cell in range(0, -(-total // step), 10):
        if len(line) <= cell:
            line = line.ljust(cell) + f"{cell * step} "
    return line.rstrip()


def timeline(program: Program, steps: Sequence[Sequence[NodeRow]], width: int) -> str:
    """Draws the steps above the cells of `uses_strip`: `h` for a host step, else `c` for a copy, else `g` for nodes of a graph."""
    kinds = [program.steps[node.step].kind[0] for node in order(steps)]
    step = max(1, -(-len(kinds) // max(width, 1)))
    return "".join([max(kinds[begin : begin + step], key="gch".index) for begin in range(0, len(kinds), step)])


def rows(places: Sequence[Place], total: int, width: int) -> Iterator[tuple[str, str, str, str]]:
    """Yields (address, size, name, uses_strip) of each place."""
    drawn, hidden = shortened(places, ROWS)
    for place in drawn:
        yield f"{place.memory}+{place.begin}", size(place.end - place.begin), place.name, uses_strip(place.uses, total, width)
    if hidden:
        yield f"and {hidden} more", "", "", ""


def shades(places: Iterable[Place], memory: str, whole: int, program_bytes: int, width: int) -> str:
    """Draws how many nodes use each part of `memory`: `width` characters for `whole` bytes, but only the first `program_bytes`."""
    parts = [place for place in places if place.memory == memory]
    begins = [place.begin for place in parts]
    cells = []
    for cell in range(width if whole else 0):
        first, cell_end = cell * whole // width, max((cell + 1) * whole // width, cell * whole // width + 1)
        if first >= program_bytes:
            break
        row = max(bisect_right(begins, first) - 1, 0)
        most = 0
        while row < len(parts) and parts[row].begin < cell_end:
            if parts[row].end > first:
                most = max(most, len(parts[row].uses))
            row += 1
        cells.append(SHADES[min(most.bit_length(), len(SHADES) - 1)])
    return "".join(cells)


def weights_line(manifest: Manifest, limit: int = 4) -> str:
    """Summarizes the weights: `30 weights, 59.5 KiB: the largest token.weight 6.0 KiB, ...`."""
    tensors = {weight.tensor: weight for weight in reversed(manifest.weights) if weight.memory != "state"}
    sized = sorted(((span(w), w.name) for w in tensors.values()), key=lambda row: (-row[0], row[1]))
    if not sized:
        return "no weights"
    top = ", ".join([f"{name} {size(number)}" for number, name in sized[:limit]])
    largest_text = f"; the largest: {top}" if len(sized) > limit else f": {top}"
    return f"{count(len(sized), 'tensor')}, {size(sum(number for number, _ in sized))}{largest_text}"
