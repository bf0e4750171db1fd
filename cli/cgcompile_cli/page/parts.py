"""The complex parts of the page: the chain of regions, the nodes, the maps of memory.  Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cgbundle.format.file_names import FORWARD
from cgbundle.format.shapes import span
from cgbundle.self_test import name_key

from ..inspection.kernels import KernelLaunches
from ..inspection.lanes import LaneRow, lanes
from ..inspection.memory_map import ROWS, Place, order
from ..inspection.nodes import HOWS, READS, REFERS, WRITES, NodeRow
from ..inspection.program_text import axes, is_chain, waits
from ..int_keys import spell
from ..output import count, listed, shortened, size
from .markup import Html, joined, tag

if TYPE_CHECKING:
    from cgbundle.format.schema import EntrySpec, Manifest, Program

CLASSES = {READS: "r", WRITES: "w", REFERS: "x"}

LISTED = 4000
"""Maximum number of nodes in the page; a node takes about 600 bytes.  The first and the last int_key are always listed, other
int_keys if their nodes fit."""

MOST_LANES = 12
"""Maximum number of lanes that are drawn.  With more lanes, only the column "after" shows the edges."""

LANE = 12
"""Width of a lane in pixels.  The height of a row depends on its text."""

Steps = Sequence[Sequence[NodeRow]]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], class_: str | None = None) -> Html:
    """Makes a table; a head with ">" is right-aligned.  Every cell also has its head as an attribute, for narrow screens."""
    columns = [(head.strip(">"), "n" if head.startswith(">") else None) for head in heads]
    first = tag("thead", tag("tr", *[tag("th", head, class_=side) for head, side in columns]))
    lines = [
        tag("tr", *[tag("td", cell, class_=side, data_h=head or None) for cell, (head, side) in zip(row, columns, strict=True)])
        for row in rows
    ]
    return tag("div", tag("table", first if any(heads) else "", tag("tbody", *lines), class_=class_), class_="scroll")


# --- regions ------------------------------------------------------------------------------------------------------


def step_boxes(manifest: Manifest, entry: EntrySpec, steps: Sequence[Steps]) -> Iterator[Html]:
    """Yields the steps as boxes with arrows, once for all int_keys whose steps have the same kinds."""
    linked_programs = _listed_programs(steps)
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, program in enumerate(entry.programs):
        groups.setdefault(tuple([step.kind for step in program.steps]), []).append(index)
    for members in groups.values():
        last = members[-1]
        if len(groups) > 1:
            yield tag("h3", "int_keys " + listed([spell(entry.programs[member].key) for member in members]))
        boxes = [
            _box(manifest, entry, last, position, [steps[member][position] for member in members], linked=last in linked_programs)
            for position in range(len(steps[last]))
        ]
        yield tag("ol", *boxes, class_="chain")
        if len(members) > 1:
            yield tag("p", f"Names and bytes are those of {name_key(entry, entry.programs[last].key)}.", class_="soft")


def _box(manifest: Manifest, entry: EntrySpec, index: int, place: int, nodes: Sequence[Sequence[NodeRow]], linked: bool) -> Html:
    """Makes the box of a step: kind, region, numbers of nodes, inputs and outputs, and why a region runs on the host."""
    program = entry.programs[index]
    step = program.steps[place]
    lines: list[object] = []
    if step.kind == "graph":
        numbers = sorted({len(node) for node in nodes})
        node_text = count(numbers[0], "node") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} nodes"
        lines.append(tag("span", tag("a", node_text, href=f"#{_anchor(entry, index, place)}") if linked else node_text))
    sides = (("in", step.inputs, program.inputs, entry.inputs), ("out", step.outputs, program.outputs, entry.outputs))
    for side, values, call_values, specs in sides:
        if values:
            called = {value: spec.name for value, spec in zip(call_values, specs, strict=True)}
            names = listed([called.get(value, f"v{value}") for value in values], 3)
            total = size(sum(span(program.values[value]) for value in values))
            lines += [tag("small", f"{side}: {names}, {total}"), Html("<br>")]
    if step.kind == "host":
        lines.append(tag("small", manifest.regions[step.region].reason))
    title = f"{step.kind} {manifest.regions[step.region].name}" if step.kind != "copy" else "copy"
    return tag("li", tag("b", title), *lines, class_=step.kind)


# --- nodes --------------------------------------------------------------------------------------------------------


def _anchor(entry: EntrySpec, program: int, step: int) -> str:
    """Returns the id of a step's nodes in the page."""
    prefix = "" if entry.name == FORWARD else f"{entry.name}-"
    return f"nodes-{prefix}{program}-{step}"


def nodes(manifest: Manifest, entry: EntrySpec, steps: Sequence[Steps]) -> Iterator[Html]:
    """Yields the nodes of every graph step of every int_key: a list that can be filtered by typing or by clicking a name."""
    hows = [tag("span", how, class_=CLASSES[how]) for how in HOWS]
    about = "reads, writes, or both; a recording does not say which. Parentheses show what is at an address"
    yield tag("p", "In an order in which they run. ", joined(hows, ", "), f": {about} when the step begins or ends.", class_="soft")
    listed = _listed_programs(steps)
    opened = False
    for index, program in enumerate(entry.programs):
        for place, step in enumerate(program.steps):
            if step.kind == "graph" and index in listed:
                yield _list(manifest, entry, index, place, steps[index][place], opened=not opened)
                opened = True
    if len(listed) < len(steps):
        hidden = count(len(steps) - len(listed), "int_key")
        yield tag("p", f"Left out to keep the page small: {hidden}. ", tag("code", "--graph KEY"), " lists them.", class_="soft")


def _listed_programs(steps: Sequence[Steps]) -> set[int]:
    """Returns the programs whose nodes are listed."""
    selected: set[int] = set()
    spent = 0
    for index in dict.fromkeys([0, len(steps) - 1, *range(len(steps))]):
        spent += sum(map(len, steps[index]))
        if len(selected) < 2 or spent <= LISTED:
            selected.add(index)
    return selected


def _list(manifest: Manifest, entry: EntrySpec, index: int, place: int, node_rows: Sequence[NodeRow], opened: bool) -> Html:
    program = entry.programs[index]
    chain = is_chain(node_rows)
    shape = "each after the one before" if chain else "in several branches"
    region = manifest.regions[program.steps[place].region].name
    about = f"graph {region}, {count(len(node_rows), 'node')}" + (f", {shape}" if len(node_rows) > 1 else "")
    box = tag("input", type="search", placeholder="narrow: a kernel, a weight, arena+0", aria_label="Narrow the list of nodes")
    rows = [] if chain else lanes(node_rows)
    width = max([lane + 1 for row in rows for lane in (row.lane, *row.passing, *row.arriving)], default=0)
    heads = ["", "#", *([] if chain else ["after"]), "kernel", "grid", "block", "shared", "memory"]
    head = tag("thead", tag("tr", *[tag("th", head, class_="n" if head == "#" else None) for head in heads]))
    if chain:
        drawn = [Html('<td class="l"></td>')] * len(node_rows)
    else:
        drawn = [tag("td", _lanes(row, width) if width <= MOST_LANES else "", class_="lanes") for row in rows]
    body = tag("tbody", *[_row(node, lane, chain) for node, lane in zip(node_rows, drawn, strict=True)])
    return tag(
        "details", tag("summary", name_key(entry, program.key), tag("small", about)),
        tag("div", box, Html("<output></output>"), class_="find", hidden=True),
        tag("div", tag("table", head, body, class_="nodes"), class_="scroll"), id=_anchor(entry, index, place), open=opened,
    )  # fmt: skip


def _lanes(row: LaneRow, width: int) -> Html:
    """Draws a row of lanes.  The node is a line of length 0 with round ends: a dot that does not stretch with the row's height."""
    middle = [LANE // 2 + LANE * lane for lane in range(width)]
    center = middle[row.lane]
    drawn = [f"M{middle[lane]} 0V20" for lane in row.passing]
    drawn += [f"M{middle[lane]} 0C{middle[lane]} 8 {center} 2 {center} 10" for lane in row.arriving]
    drawn += [f"M{center} 10V20"] if row.leaving else []
    stroke = {"vector_effect": "non-scaling-stroke"}
    parts = [tag("path", d="".join(drawn), **stroke) if drawn else "", tag("path", class_="o", d=f"M{center} 10h0", **stroke)]
    return tag("svg", *parts, width=LANE * width, viewBox=f"0 0 {LANE * width} 20", preserveAspectRatio="none", aria_hidden="true")


def _row(node: NodeRow, lane: Html, chain: bool) -> Html:
    cells = [lane, tag("td", node.number, class_="n")]
    if not chain:
        cells.append(tag("td", waits(node), class_="s", data_h="after"))
    cluster = f" cluster {axes(node.cluster)}" if node.cluster else ""
    cells.append(tag("td", "\u2003" * node.depth + node.what, class_="k"))
    for name, value in (("grid", axes(node.grid) + cluster), ("block", axes(node.block)), ("shared", size(node.shared))):
        cells.append(tag("td", value if node.kind == "kernel" and value != "0 B" else "", class_="s", data_h=name))
    parts = []
    for how in HOWS:
        names = [tag("i", reference.name, class_=CLASSES[how]) for reference in node.references if reference.how == how]
        parts += [joined([f"{how} ", joined(names, ", ")])] if names else []
    cells.append(tag("td", joined(parts, "; "), class_="m"))
    return tag("tr", *cells)


def kernel_rows(rows: Sequence[KernelLaunches]) -> Iterator[Html]:
    """Yields a sentence and the table of the kernels, in the order of `rows`."""
    configured = any(row.configuration or row.chosen for row in rows)
    heads = (">launches", ">image", "kernel", *(("configuration", "chosen by") if configured else ()), "SHA-256")
    lines = [
        (row.launches, size(row.image_bytes), tag("code", row.symbol), *((row.configuration, row.chosen) if configured else ()),
         row.image[:12])
        for row in rows
    ]  # fmt: skip
    yield tag("p", "Launches of all int_keys together, one call each.", class_="soft")
    yield table(heads, lines, "roomy")


# --- memory -------------------------------------------------------------------------------------------------------


def memory(manifest: Manifest, entry: EntrySpec, steps: Sequence[Steps], maps: Sequence[Sequence[Place]]) -> Iterator[Html]:
    """Yields the bytes of every memory, a bar per int_key, and the uses of every place by int_key."""
    memories = [(name, number) for name, number in manifest.memories if number]
    largest = max([number for _, number in memories], default=0)
    yield table(("memory", ">bytes", ""), [(name, size(n), _bar([("a", n)], largest)) for name, n in memories], "bars")
    if not any(maps):
        yield tag(
            "p", "Values lie in memory that the caller brings or that the host region allocates during the call.", class_="soft"
        )
        return
    if len(entry.programs) > 1:
        most = max([program.arena + program.static for program in entry.programs])
        bars = [
            (spell(p.key), size(p.arena), size(p.static), _bar([("a", p.arena), ("i", p.static)], most)) for p in entry.programs
        ]
        yield tag("h3", "Arena and inputs of every int_key")
        yield tag("p", "All int_keys share one arena, the largest.", class_="soft")
        names = " x ".join([dimension.name for dimension in entry.dimensions]) or "int_key"
        yield table((names, ">arena", ">inputs", ""), bars, "bars")
    yield tag("h3", "Uses of memory over time")
    legend = [(WRITES, "writes"), (REFERS, "refers to (one or both)"), (READS, "reads")]
    marks = [part for how, name in legend for part in (tag("span", class_=f"swatch {CLASSES[how]}"), name)]
    yield tag("p", "From left to right the nodes and steps in order.", *marks, tag("span", class_="swatch b"), "between the first "
              "and the last use. A place ends, at the latest, where the next one begins.", class_="soft")  # fmt: skip
    for index, (program, program_steps, places) in enumerate(zip(entry.programs, steps, maps, strict=True)):
        yield _map(entry, program, program_steps, places, opened=index == len(maps) - 1)


def _map(entry: EntrySpec, program: Program, steps: Steps, areas: Sequence[Place], opened: bool) -> Html:
    total = sum(map(len, steps))
    rows: list[tuple[object, ...]] = []
    if len(steps) > 1:
        rows.append(("steps", "", "", _timeline(program, order(steps))))
    drawn, hidden = shortened(areas, ROWS)
    rows += [(f"{place.memory}+{place.begin}", size(place.end - place.begin), place.name, _uses(place, total)) for place in drawn]
    if hidden:
        rows.append((f"and {hidden} more", "", "", ""))
    about = f"{count(len(areas), 'place')}, {count(total, 'node')} and steps" if len(steps) > 1 else f"{count(len(areas), 'place')}"
    head = tag("summary", name_key(entry, program.key), tag("small", about))
    return tag("details", head, table(("place", ">up to", "", ""), rows, "places"), open=opened)


def _svg(width: int, *parts: object) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {max(width, 1)} 8", preserveAspectRatio="none", aria_hidden="true")


def _path(cells: Iterable[tuple[int, int]], class_: str, top: int = 0, height: int = 8) -> Html:
    """Draws boxes (from, to) as one path; "" for none."""
    drawn = "".join([f"M{begin} {top}h{end - begin}v{height}H{begin}z" for begin, end in cells])
    return tag("path", d=drawn, class_=class_) if drawn else Html("")


def _runs(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (first, end) of each run of consecutive positions."""
    runs: list[tuple[int, int]] = []
    for position in sorted(positions):
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def _uses(place: Place, total: int) -> Html:
    if not place.uses:
        return Html("")
    between = _path([(min(place.uses), max(place.uses) + 1)], "b", 3, 2)
    kinds = [_path(_runs([p for p, how in place.uses.items() if how == kind]), CLASSES[kind]) for kind in (READS, REFERS, WRITES)]
    return _svg(total, between, *kinds)


def _timeline(program: Program, node_rows: Sequence[NodeRow]) -> Html:
    kinds: dict[str, list[int]] = {}
    for position, node in enumerate(node_rows):
        kinds.setdefault(program.steps[node.step].kind, []).append(position)
    return _svg(len(node_rows), *[_path(_runs(positions), kind) for kind, positions in kinds.items()])


def _bar(parts: Sequence[tuple[str, int]], total: int) -> Html:
    """Draws consecutive parts of `total`, in thousandths."""
    boxes, begin = [], 0
    for class_, number in parts:
        end = begin + (max(2, number * 1000 // total) if number and total else 0)
        boxes.append(_path([(begin, end)], class_) if end > begin else "")
        begin = end
    return _svg(1000, *boxes)
