"""Lifetimes across the steps of a program: what is still to be read is not written over, and neither is what no call changes.

Derived anew from the steps, the values and the recordings, with nothing of the planners' that placed them.  A kernel writes where
its code does, which no table says.  Only where its arguments begin is known: an overwrite through one that begins elsewhere is the
planner's to rule out, and what it does to weights, inputs and state is not checked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NoReturn

from ..errors import BundleError
from ..format.schema import MEMORIES, EntrySpec, Manifest, Program
from ..format.spans import Cover, Spans, extent, span

if TYPE_CHECKING:
    from ..tables.table import Table


KEPT = {
    "weights": "which no call changes",
    "state": "not all of it in one buffer that `mutated_buffers` names",
    "inputs": "not all of it in one input that `mutated_inputs` names",
}
"""Memories whose contents are not the recording's to change, and what is wrong with a write there."""


def check_lifetimes(program: Program, where: str) -> None:
    """Raises manifest-invalid where a step writes over what a later one, or the call's outputs, still need.

    Nor may its outputs share a byte with its inputs or each other.  Those of a graph step may: its recording has an order of its
    own, and its outputs may be views of one another.  Every value is written once: `check_order` holds.
    """
    for number, step in enumerate(program.steps):
        if step.kind != "graph":
            read = Spans.of(program.values, step.inputs)
            for index in step.outputs:
                other = read.over(program.values[index].memory, *extent(program.values[index]))
                if other is not None:
                    _refuse_own(where, number, index, other)
    last = _last_reads(program)
    rows: dict[str, list[tuple[int, int, int, int, int]]] = {}
    for number, step in enumerate(program.steps):
        for index in step.outputs:
            begin, end = extent(program.values[index])
            if begin < end:
                row = (begin, end, number, last.get(index, -1), index)
                rows.setdefault(program.values[index].memory, []).append(row)
    for memory_rows in rows.values():
        _check_memory(program, memory_rows, where)


def _check_memory(program: Program, rows: list[tuple[int, int, int, int, int]], where: str) -> None:
    """`rows` are (begin, end, step that writes, last step that reads, index) of the values in one memory.

    Walks through the memory from its first byte on, with the values that lie there sorted by the steps that write them.  As long as
    nothing is wrong, each has been read for the last time when the next one is written: a new one is compared with two alone.
    """
    writers: list[int] = []
    lying: dict[int, list[tuple[int, int, int]]] = {}  # by writer: (-last step that reads, end, index), a heap

    def lies(at: int, begin: int) -> bool:
        """Whether anything of writer number `at` still lies at `begin`; forgets the writer where not."""
        heap = lying[writers[at]]
        while heap and heap[0][1] <= begin:
            heappop(heap)
        if not heap:
            del lying[writers.pop(at)]
        return bool(heap)

    for begin, end, writer, reader, index in sorted(rows):
        at = bisect_left(writers, writer)
        while at and not lies(at - 1, begin):
            at -= 1
        if at and (last := -lying[writers[at - 1]][0][0]) > writer:
            _refuse(program, where, writer, index, lying[writers[at - 1]][0][2], last)
        while at < len(writers) and not lies(at, begin):
            pass
        if at < len(writers) and writers[at] == writer:
            if program.steps[writer].kind != "graph":
                _refuse_own(where, writer, index, lying[writer][0][2])
            at += 1
            while at < len(writers) and not lies(at, begin):
                pass
        if at < len(writers) and reader > writers[at]:
            _refuse(program, where, writers[at], lying[writers[at]][0][2], index, reader)
        if writer not in lying:
            lying[writer] = []
            insort(writers, writer)
        heappush(lying[writer], (-reader, end, index))


def _refuse_own(where: str, writer: int, index: int, other: int) -> NoReturn:
    at = f"{where}.steps[{writer}]"
    raise BundleError("manifest-invalid", f"{at}: value {index}, an output, lies over value {other} of this step")


def _refuse(program: Program, where: str, writer: int, index: int, other: int, reader: int) -> NoReturn:
    later = _reader(program, reader)
    raise BundleError("manifest-invalid", f"{where}.steps[{writer}]: writes value {index} over value {other}, which {later}")


def check_overwrites(program: Program, place: int, table: Table) -> None:
    """Raises table-invalid where the recording of step `place` uses what others left for a later step.

    No argument of a kernel may begin in a value that outlives the step and is none of its own, no memset or memcpy write over one.
    `table` is sound: `check_recording` holds.
    """
    last, step = _last_reads(program), program.steps[place]
    before = {index for earlier in program.steps[:place] for index in earlier.outputs}
    alive = [index for index in before if last.get(index, -1) > place]
    if not alive:
        return
    living, step_spans = Spans.of(program.values, alive), Spans.of(program.values, (*step.inputs, *step.outputs))
    for memory, begin, size in written(table):
        index = living.over(memory, begin, begin + size)
        if index is not None:
            used = f"value {index}, which {_reader(program, last[index])}"
            raise BundleError("table-invalid", f"{table.where}: a node writes over {used}")
    for memory, begin in _points(table):
        index = living.over(memory, begin, begin + 1)
        if index is not None and step_spans.over(memory, begin, begin + 1) is None:
            used = f"value {index}, which {_reader(program, last[index])}"
            raise BundleError("table-invalid", f"{table.where}: a node uses {used}, and the step does not name it")


def changed_rows(manifest: Manifest, entry: EntrySpec) -> list[tuple[str, int, int]]:
    """(memory, first byte, the one behind the last) of the state that calls of the entry change."""
    rows = [manifest.weights[index] for index in entry.mutated_buffers]
    return [(row.memory, row.offset, row.offset + span(row)) for row in rows]


def writable(manifest: Manifest, entry: EntrySpec, program: Program) -> Cover:
    """What the recordings of an entry's program may write to beside the arena.

    Beside state and inputs that calls change, these are values that copy steps put into memory inputs.  They lie over no input that
    calls leave as it is: `check_order` holds.
    """
    chosen = [program.inputs[index] for index in entry.mutated_inputs]
    chosen += [index for step in program.steps if step.kind == "copy" for index in step.outputs]
    values = [program.values[index] for index in chosen]
    rows = [(value.memory, *extent(value)) for value in values if value.memory == "inputs"]
    return Cover([*rows, *changed_rows(manifest, entry)])


def check_targets(table: Table, allowed: Cover) -> None:
    """Raises table-invalid where a memset or memcpy writes to weights, or to inputs or state outside of `allowed`: from its first
    byte to its last, in every graph and body of the recording.  `table` is sound: `check_recording` holds."""
    for number, (memory, begin, size) in enumerate(written(table)):
        if memory in KEPT and not allowed.holds(memory, begin, begin + size):
            text = f"writes bytes {begin} to {begin + size} of memory {memory}, {KEPT[memory]}"
            raise BundleError("table-invalid", f"{table.where}: nodes[{_position(table, number)}]: {text}")


def _position(table: Table, number: int) -> int:
    """Where among the nodes the `number`-th of the memsets and, behind them, the memcpys stands."""
    from ..tables.table import MEMCPY, MEMSET

    kinds = bytes(table.kind)
    return [position for wanted in (MEMSET, MEMCPY) for position, kind in enumerate(kinds) if kind == wanted][number]


def check_untouched(table: Table, reserved: Spans) -> None:
    """Raises table-invalid where the recording uses what is reserved for outputs of other entries; as far as `check_overwrites`
    knows what it uses."""
    for memory, begin, size in (*written(table), *[(memory, begin, 1) for memory, begin in _points(table)]):
        if reserved.over(memory, begin, begin + size) is not None:
            text = f"a node uses byte {begin} of memory {memory}, which is reserved for another entry"
            raise BundleError("table-invalid", f"{table.where}: {text}")


def donated_by_others(manifest: Manifest, entry: str) -> Spans:
    """The parts of memory arena in which the outputs that other entries than `entry` donate lie."""
    rows = enumerate(manifest.donated)
    return Spans(("arena", row.offset, row.offset + row.bytes, number) for number, row in rows if row.entry != entry)


def _last_reads(program: Program) -> dict[int, int]:
    """By value, the last step that reads it; the number of steps for an output of the call."""
    last = {index: place for place, step in enumerate(program.steps) for index in step.inputs}
    return last | dict.fromkeys(program.outputs, len(program.steps))


def _reader(program: Program, place: int) -> str:
    return "the call gives out" if place == len(program.steps) else f"steps[{place}] reads"


def _points(table: Table) -> Iterator[tuple[str, int]]:
    """(memory, offset) of the first byte of everything that kernels are given and that memcpys read."""
    rows = zip(table.relocation_memory, table.relocation_offset, strict=True)
    for memory, offset in sorted({*rows, *zip(table.memcpy_memory[::2], table.memcpy_offset[::2], strict=True)}):
        yield MEMORIES[memory], offset


def written(table: Table) -> Iterator[tuple[str, int, int]]:
    """(memory, offset, bytes) of what memsets and memcpys write, from the first byte to the last."""
    for row in range(table.counts["memsets"]):
        width, rows = table.memset_width[row] * table.memset_element[row], table.memset_height[row]
        size = (rows - 1) * table.memset_pitch[row] + width
        yield MEMORIES[table.memset_memory[row]], table.memset_offset[row], size
    for row in range(table.counts["memcpys"]):
        width, rows, slices = table.memcpy_extent[3 * row : 3 * row + 3]
        pitch, height = table.memcpy_pitch[4 * row + 2 : 4 * row + 4]
        size = ((slices - 1) * height + rows - 1) * pitch + width
        yield MEMORIES[table.memcpy_memory[2 * row + 1]], table.memcpy_offset[2 * row + 1], size
