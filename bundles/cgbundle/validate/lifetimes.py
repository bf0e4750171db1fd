"""Lifetimes across the steps of a program: what is still to be read is not written over.

Derived anew from the steps, the values and the recordings, with nothing of the planners' that placed them.  Of a kernel only where
its arguments begin is known: an overwrite through one that begins elsewhere is the planner's to rule out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import BundleError
from ..format.schema import MEMORIES, Program, Value
from ..format.spans import overlap

if TYPE_CHECKING:
    from ..tables.table import Table


def check_lifetimes(program: Program, where: str) -> None:
    """Raises manifest-invalid where a step writes over what a later one, or the call's outputs, still need.

    Nor may its outputs share a byte with its inputs or each other.  Those of a graph step may: its recording has an order of its
    own, and its outputs may be views of one another.
    """
    values, last = program.values, _last_reads(program)
    alive: list[int] = []
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        alive = [index for index in alive if last.get(index, -1) > place]
        for index in step.outputs:
            for other in alive:
                if overlap(values[index], values[other]):
                    later = _reader(program, last[other])
                    raise BundleError("manifest-invalid", f"{at}: writes value {index} over value {other}, which {later}")
        for number, index in enumerate(step.outputs if step.kind != "graph" else ()):
            for other in (*step.inputs, *step.outputs[:number]):
                if overlap(values[index], values[other]):
                    raise BundleError("manifest-invalid", f"{at}: value {index}, an output, lies over value {other} of this step")
        alive.extend(step.outputs)


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
    own = [program.values[index] for index in (*step.inputs, *step.outputs)]
    for target in _written(table):
        for index in alive:
            if overlap(target, program.values[index]):
                used = f"value {index}, which {_reader(program, last[index])}"
                raise BundleError("table-invalid", f"{table.where}: a node writes over {used}")
    for point in _points(table):
        for index in alive:
            if overlap(point, program.values[index]) and not any(overlap(point, value) for value in own):
                used = f"value {index}, which {_reader(program, last[index])}"
                raise BundleError("table-invalid", f"{table.where}: a node uses {used}, and the step does not name it")


def _last_reads(program: Program) -> dict[int, int]:
    """By value, the last step that reads it; the number of steps for an output of the call."""
    last = {index: place for place, step in enumerate(program.steps) for index in step.inputs}
    return last | dict.fromkeys(program.outputs, len(program.steps))


def _reader(program: Program, place: int) -> str:
    return "the call gives out" if place == len(program.steps) else f"steps[{place}] reads"


def _bytes(memory: int, offset: int, size: int) -> Value:
    return Value(dtype="uint8", shape=(size,), strides=(1,), memory=MEMORIES[memory], offset=offset)


def _points(table: Table) -> Iterator[Value]:
    """The first byte of everything that kernels are given and that memcpys read."""
    rows = zip(table.relocation_memory, table.relocation_offset, strict=True)
    for memory, offset in sorted({*rows, *zip(table.memcpy_memory[::2], table.memcpy_offset[::2], strict=True)}):
        yield _bytes(memory, offset, 1)


def _written(table: Table) -> Iterator[Value]:
    """What memsets and memcpys write, from the first byte to the last."""
    for row in range(table.counts["memsets"]):
        width, rows = table.memset_width[row] * table.memset_element[row], table.memset_height[row]
        size = (rows - 1) * table.memset_pitch[row] + width
        yield _bytes(table.memset_memory[row], table.memset_offset[row], size)
    for row in range(table.counts["memcpys"]):
        width, rows, slices = table.memcpy_extent[3 * row : 3 * row + 3]
        pitch, height = table.memcpy_pitch[4 * row + 2 : 4 * row + 4]
        size = ((slices - 1) * height + rows - 1) * pitch + width
        yield _bytes(table.memcpy_memory[2 * row + 1], table.memcpy_offset[2 * row + 1], size)
