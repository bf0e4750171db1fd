"""Describes the steps of a program: one row for each node, copy and host region.

A recording contains addresses, but not how kernels use them.  These rules give the uses:
- memory `weights` is only read, and so are inputs of the call and of a step that are not in `mutated_inputs`;
- a memset writes, a memcpy reads its source and writes its target, copy and host steps name their reads and writes;
- a kernel that sets the condition of a branch or loop reads one byte;
- every kernel writes something: if all its addresses but one are only read, it writes that one.
For all other addresses it is unknown whether the kernel reads or writes them: it "refers to" them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from cgbundle.format import archive, file_names
from cgbundle.format.schema import MEMORIES, EntrySpec, Manifest, Program, Step
from cgbundle.format.shapes import graph_memories, span
from cgbundle.format.table import CONDITIONAL, SET_CONDITION, SWITCH, WHILE, Table, launch_order
from cgbundle.validate.recordings import check_recording

from ..output import size
from .names import Names

READS, WRITES, REFERS = "reads", "writes", "refers to"
HOWS = (READS, WRITES, REFERS)

CLUSTER = 4
"""CUlaunchAttributeID of the cluster dimensions, as in cgbundle.validate.recordings."""

PROGRAMMATIC = 1
"""Type of an edge whose target may start before its source has ended (programmatic dependent launch)."""


class Reference(NamedTuple):
    """An address that a node uses: `how` is one of HOWS; `bytes` is the length from `offset`, or 0 if unknown."""

    how: str
    memory: str
    offset: int
    bytes: int
    name: str


class NodeRow(NamedTuple):
    """A node of a recording, or a copy or host step.

    `kind` is kernel, memset, memcpy, empty, conditional, copy or host; `number` the node's position in its recording.  `what` is
    the kernel's symbol, or a description.  `after` are the nodes that it waits for; `early` those of them with programmatic edges.
    `grid`, `block` and `cluster` are (x, y, z), or (); `shared` is the bytes of dynamic shared memory.  `body` is the body of a
    conditional node that contains this node, or -1; `depth` the nesting depth; `bodies` are those of a conditional node.
    """

    step: int
    number: int
    kind: str
    what: str
    image: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared: int
    after: tuple[int, ...]
    early: tuple[int, ...]
    references: tuple[Reference, ...]
    body: int = -1
    depth: int = 0
    bodies: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Returns a dict for JSON."""
        return self._asdict() | {"references": [reference._asdict() for reference in self.references]}


_BARE = NodeRow(0, 0, "empty", "(orders other nodes)", "", (), (), (), 0, (), (), ())


def read_nodes(path: str, manifest: Manifest, entry: EntrySpec, program: Program) -> list[list[NodeRow]]:
    """Returns the nodes of every step of a program of `entry`, in a valid order.  Raises file-damaged, table-invalid."""
    files = {file.path: file for file in manifest.files}
    images = file_names.kernel_images(manifest)
    names = Names(manifest, entry, program)
    rows: list[list[NodeRow]] = []
    for index, step in enumerate(program.steps):
        if step.kind == "graph":
            table = Table(archive.read(path, files[step.file]), step.file)
            check_recording(table, graph_memories(manifest.memories), images)
            rows.append(graph_rows(table, entry, program, index, names))
        else:
            rows.append([_step_row(manifest, program, index, step, names)])
    return rows


def graph_rows(table: Table, entry: EntrySpec, program: Program, index: int, names: Names) -> list[NodeRow]:
    """Returns the nodes of a graph step in `launch_order`; the nodes of bodies follow their conditional node."""
    step = program.steps[index]
    reader = _Reader(entry, program, step, names)
    after: dict[int, list[int]] = {}
    early: dict[int, list[int]] = {}
    for source, target, kind in zip(table.edge_source, table.edge_target, table.edge_type, strict=True):
        after.setdefault(target, []).append(source)
        if kind == PROGRAMMATIC:
            early.setdefault(target, []).append(source)
    rows, counts = [], [0, 0, 0, 0, 0]
    for kind in table.kind:
        rows.append(counts[kind])
        counts[kind] += 1
    nodes = []
    for number, depth in _nested(table, rows):
        row = _READ[table.kind[number]](table, rows[number], reader)
        sources, early_sources = (tuple(sorted(edges.get(number, ()))) for edges in (after, early))
        body = table.graph(number) - 1
        nodes.append(row._replace(step=index, number=number, after=sources, early=early_sources, body=body, depth=depth))
    return nodes


def _nested(table: Table, rows: list[int]) -> Iterator[tuple[int, int]]:
    """Yields (position, depth) of every node, in launch order; the nodes of bodies follow their conditional node."""
    graphs: list[list[int]] = [[] for _ in table.spans()]
    for number in launch_order(table):
        graphs[table.graph(number)].append(number)

    def walk(graph: int, depth: int) -> Iterator[tuple[int, int]]:
        for number in graphs[graph]:
            yield number, depth
            if table.kind[number] == CONDITIONAL:
                for body in table.conditional_body[slice(*table.conditional_bounds[rows[number] : rows[number] + 2])]:
                    yield from walk(body + 1, depth + 1)

    yield from walk(0, 0)


class _Reader(NamedTuple):
    entry: EntrySpec
    program: Program
    step: Step
    names: Names

    def reference(self, how: str, memory: int, offset: int, length: int = 0) -> Reference:
        where = MEMORIES[memory]
        return Reference(how, where, offset, length, self.names.of(where, offset, self.step.inputs, self.step.outputs))

    def only_read(self, memory: int, offset: int) -> bool:
        """Returns whether kernels of a valid bundle only read at this address."""
        if MEMORIES[memory] != "inputs":
            return MEMORIES[memory] == "weights"
        mutated = [self.program.inputs[position] for position in self.entry.mutated_inputs]
        covering = []
        for index in dict.fromkeys([*self.program.inputs, *self.step.inputs]):
            value = self.program.values[index]
            if value.memory == "inputs" and value.offset <= offset < value.offset + max(span(value), 1):
                covering.append(index)
        return bool(covering) and not any(index in mutated or index in self.step.outputs for index in covering)


def _empty(table: Table, row: int, reader: _Reader) -> NodeRow:
    return _BARE


def _kernel(table: Table, row: int, reader: _Reader) -> NodeRow:
    function = table.function[row]
    places = slice(*table.relocation_bounds[row : row + 2])
    addresses = list(dict.fromkeys(zip(table.relocation_memory[places], table.relocation_offset[places], strict=True)))
    writable = [address for address in addresses if not reader.only_read(*address)]
    how = WRITES if len(writable) == 1 else REFERS
    references = tuple([reader.reference(how if address in writable else READS, *address) for address in addresses])
    if table.symbols[function] == SET_CONDITION:
        references = tuple([reader.reference(READS, *address, 1) for address in addresses])
    cluster: tuple[int, ...] = ()
    for attribute in range(*table.attribute_bounds[row : row + 2]):
        if table.attribute_id[attribute] == CLUSTER:
            cluster = tuple(table.attribute_value[3 * attribute : 3 * attribute + 3])
    return _BARE._replace(
        kind="kernel",
        what=table.symbols[function],
        image=table.images[function],
        grid=(table.grid_x[row], table.grid_y[row], table.grid_z[row]),
        block=(table.threads_x[row], table.threads_y[row], table.threads_z[row]),
        cluster=cluster,
        shared=table.shared[row],
        references=references,
    )


def _memset(table: Table, row: int, reader: _Reader) -> NodeRow:
    width, height, pitch = table.memset_width[row] * table.memset_element[row], table.memset_height[row], table.memset_pitch[row]
    rows = f" in {height} rows, {pitch} B apart" if height > 1 else ""
    what = f"memset {size(width * height)} to {table.memset_value[row]:#x}{rows}"
    length = (height - 1) * pitch + width
    target = reader.reference(WRITES, table.memset_memory[row], table.memset_offset[row], length)
    return _BARE._replace(kind="memset", what=what, references=(target,))


def _memcpy(table: Table, row: int, reader: _Reader) -> NodeRow:
    width, height, depth = table.memcpy_extent[3 * row : 3 * row + 3]
    pitches = table.memcpy_pitch[4 * row : 4 * row + 4].tolist()
    ends = []
    for end, how in enumerate((READS, WRITES)):
        pitch, rows = pitches[2 * end : 2 * end + 2]
        length = ((depth - 1) * rows + height - 1) * pitch + width
        ends.append(reader.reference(how, table.memcpy_memory[2 * row + end], table.memcpy_offset[2 * row + end], length))
    return _BARE._replace(kind="memcpy", what=f"memcpy {size(width * height * depth)}", references=tuple(ends))


def _conditional(table: Table, row: int, reader: _Reader) -> NodeRow:
    bodies = tuple(table.conditional_body[slice(*table.conditional_bounds[row : row + 2])])
    if table.conditional_type[row] == WHILE:
        what = f"while: body {bodies[0]}"
    elif table.conditional_type[row] == SWITCH:
        what = "switch: " + ", ".join([f"{case} body {body}" for case, body in enumerate(bodies)])
    else:
        what = f"if: body {bodies[0]}" + (f", else body {bodies[1]}" if len(bodies) > 1 else "")
    return _BARE._replace(kind="conditional", what=what, bodies=bodies)


_READ = (_empty, _kernel, _memset, _memcpy, _conditional)
"""Functions that describe a node, in the order of the kinds in cgbundle.format.table."""


def _step_row(manifest: Manifest, program: Program, index: int, step: Step, names: Names) -> NodeRow:
    """Describes a copy or host step as one row; values of the cpu target have no address."""
    references = []
    for how, values in ((READS, step.inputs), (WRITES, step.outputs)):
        for number in values:
            value = program.values[number]
            cpu = manifest.target.kind == "cpu"
            name = names.value(number) if cpu else names.of(value.memory, value.offset, writes=(number,))
            references.append(Reference(how, value.memory, value.offset, span(value), name))
    what = f"copy {size(span(program.values[step.inputs[0]]))}"
    if step.kind == "host":
        what = f"host region {manifest.regions[step.region].name}"
    return _BARE._replace(step=index, kind=step.kind, what=what, references=tuple(references))
