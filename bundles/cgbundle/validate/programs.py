"""Invariants of a manifest's programs: keys, values, inputs, outputs, and what each step may read and write."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from ..errors import BundleError
from ..format import limits
from ..format.safetensors import nbytes
from ..format.schema import HOST, MEMORIES, PERSISTENT, Alias, EntrySpec, Manifest, Program, Value, Weight
from ..format.shapes import Cover, Spans, evaluate, extent, is_dense, operands, span
from . import require, require_apart

if TYPE_CHECKING:
    from ..format.table import Table


def check_programs(manifest: Manifest, entry: EntrySpec) -> None:
    count = prod(len(dimension.sizes) for dimension in entry.dimensions)
    require(len(entry.programs) == count, "programs", f"{len(entry.programs)}, the dimensions' sizes make {count}")
    keys = list(product(*[dimension.sizes for dimension in entry.dimensions]))
    program_keys = [program.key for program in entry.programs]
    require(program_keys == keys, "programs", f"keys {program_keys[:4]}... are not the product of the dimensions' sizes")
    for index, program in enumerate(entry.programs):
        _check_program(manifest, entry, program, f"programs[{index}]")


def check_size_evaluations(entries: Sequence[EntrySpec]) -> None:
    total = 0
    for entry in entries:
        sizes = sum(operands(size) for spec in (*entry.inputs, *entry.outputs) for size in spec.shape)
        total += sizes * len(entry.programs)
        few = total <= limits.SIZE_EVALUATIONS
        text = f"{len(entry.programs)} of {sizes} sizes and operators, more than the limit of {limits.SIZE_EVALUATIONS} in all"
        require(few, "programs", text)


def _check_program(manifest: Manifest, entry: EntrySpec, program: Program, where: str) -> None:
    memories = dict(manifest.memories)
    aliases = {program.outputs[alias.output] for alias in entry.aliases if alias.output < len(program.outputs)}
    for place, value in enumerate(program.values):
        _check_value(manifest, memories, value, f"{where}.values[{place}]", alias=place in aliases)
    sizes = {dimension.name: size for dimension, size in zip(entry.dimensions, program.key, strict=True)}
    for kind, positions, specs in (("inputs", program.inputs, entry.inputs), ("outputs", program.outputs, entry.outputs)):
        require(len(positions) == len(specs), f"{where}.{kind}", f"{len(positions)} values, the signature has {len(specs)}")
        for place, (position, spec) in enumerate(zip(positions, specs, strict=True)):
            at = f"{where}.{kind}[{place}]"
            require(0 <= position < len(program.values), at, f"no value {position}")
            value = program.values[position]
            require(value.dtype == spec.dtype, at, f"dtype {value.dtype}, the signature has {spec.dtype}")
            try:
                expected = tuple([evaluate(size, sizes) for size in spec.shape])
            except ZeroDivisionError:
                raise BundleError("manifest-invalid", f"{at}: the signature's shape divides by zero at {sizes}") from None
            require(value.shape == expected, at, f"shape {list(value.shape)}, the signature gives {list(expected)}")
            if kind == "inputs":
                ordered = is_dense(value.shape, value.strides, spec.order)
                require(ordered, at, f"strides {list(value.strides)} are not those of the signature's order {list(spec.order)}")
    for field, memory, size in (("arena", "arena", program.arena), ("static", "inputs", program.static)):
        require(size <= memories.get(memory, 0), f"{where}.{field}", f"{size} bytes, memory {memory} has less")
        for place, value in enumerate(program.values):
            inside = value.memory != memory or value.offset + span(value) <= size
            require(inside, f"{where}.values[{place}].offset", f"ends behind the program's {size} bytes of memory {memory}")
    _check_inputs(manifest.target.kind, program, where)
    check_steps(manifest, entry, program, where)
    if program.lowerings:
        _check_lowerings(program, where)


def _check_lowerings(program: Program, where: str) -> None:
    """Names are unique, one lowering is chosen, and each has a time for every graph, or a reason."""
    names = [lowering.name for lowering in program.lowerings]
    require(len(set(names)) == len(names), f"{where}.lowerings", "a name occurs twice")
    chosen = sum(lowering.chosen for lowering in program.lowerings)
    require(chosen == 1, f"{where}.lowerings", f"{chosen} are chosen, expected one")
    graphs = sum(step.kind == "graph" for step in program.steps)
    for place, lowering in enumerate(program.lowerings):
        at, times = f"{where}.lowerings[{place}]", lowering.microseconds
        if lowering.reason:
            require(not (times or lowering.chosen), at, "it has a reason why it was left out, and was not")
            continue
        require(len(times) == graphs, f"{at}.microseconds", f"{len(times)} times, the program has {graphs} graph steps")
        require(min(times, default=0.0) >= 0, f"{at}.microseconds", "a negative time")


def _check_inputs(target: str, program: Program, where: str) -> None:
    """Inputs are different values. On a GPU they do not overlap in memory `inputs`; on a CPU all values are inputs or outputs."""
    if target == "cpu":
        whole = sorted((*program.inputs, *program.outputs)) == list(range(len(program.values)))
        require(whole, f"{where}.values", "of a cpu program each is one input or one output of the call")
        return
    ranges = []
    for place, index in enumerate(program.inputs):
        value = program.values[index]
        if span(value):  # an input without elements has no address
            require(value.memory == "inputs", f"{where}.inputs[{place}]", f"lies in memory {value.memory}, not in inputs")
            ranges.append((*extent(value), f"{where}.inputs[{place}]"))
    require(len(set(program.inputs)) == len(program.inputs), f"{where}.inputs", "a value occurs twice")
    require_apart(ranges, "lies over another input of the call")


def _check_value(manifest: Manifest, memories: dict[str, int], value: Value, where: str, *, alias: bool) -> None:
    """`alias`: the value shares memory; on the cpu target its offset counts from the tensor that it shares with."""
    require(value.memory != "peer", f"{where}.memory", "a value in memory peer, where addresses alone lie")
    size = checked_span(where, value)
    if manifest.target.kind == "cpu":
        require(value.memory == "host", f"{where}.memory", f"a value of the cpu target in memory {value.memory}")
        require(value.offset == 0 or alias, f"{where}.offset", "a value in host memory has none")
    else:
        fits = value.offset >= 0 and value.offset + size <= memories.get(value.memory, 0)
        require(fits, f"{where}.offset", f"outside memory {value.memory}")


def checked_span(where: str, row: Value | Weight) -> int:
    require(len(row.shape) == len(row.strides), f"{where}.strides", "do not match the shape")
    require(min(row.shape, default=0) >= 0 and min(row.strides, default=0) >= 0, where, "negative size or stride")
    size = span(row)
    small = max(row.offset + size, nbytes(row.dtype, row.shape)) < limits.INTEGER
    require(small, where, "more bytes than 64 bits count")
    return size


# --- steps ----------------------------------------------------------------------------------------------------------


def check_steps(manifest: Manifest, entry: EntrySpec, program: Program, where: str) -> None:
    require(bool(program.steps), f"{where}.steps", "no step")
    changing, values, regions = Cover(changed_rows(manifest, entry)), program.values, manifest.regions
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        require(all(0 <= value < len(values) for value in (*step.inputs, *step.outputs)), at, "no such value")
        require((step.kind == "graph") == bool(step.file), f"{at}.file", "a graph step has a table, others none")
        if step.kind == "copy":
            require(len(step.inputs) == len(step.outputs) == 1, at, "a copy has one input and one output")
            source, target = values[step.inputs[0]], values[step.outputs[0]]
            same = (source.dtype, source.shape, source.strides) == (target.dtype, target.shape, target.strides)
            require(same, at, "a copy between values of different layouts")
            known = target.memory != "state" or not span(target) or changing.holds(target.memory, *extent(target))
            require(known, at, "copies into memory state, outside of the buffers that `mutated_buffers` names")
        else:
            require(0 <= step.region < len(regions), f"{at}.region", f"no region {step.region}")
            require(regions[step.region].kind == step.kind, f"{at}.region", "is of another kind")
    if manifest.target.kind == "cpu":
        (step, *more) = program.steps
        whole = step.kind == HOST and not more and step.inputs == program.inputs and step.outputs == program.outputs
        require(whole, f"{where}.steps", "a cpu program is one host step over the call's values")
    else:
        _check_sides(program, where)
        check_order(program, where, {alias.output: alias for alias in entry.aliases}, entry.mutated_inputs)
        check_lifetimes(program, where)


def _check_sides(program: Program, where: str) -> None:
    """Only copies cross between host and GPU: values of the call and of graph steps are on the GPU, values of host steps are
    not."""
    values = program.values
    for kind, positions in (("inputs", program.inputs), ("outputs", program.outputs)):
        for place, index in enumerate(positions):
            require(values[index].memory != HOST, f"{where}.{kind}[{place}]", "lies in memory host, not on the GPU")
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        used = [(f"value {index}", values[index].memory) for index in (*step.inputs, *step.outputs)]
        if step.kind == "copy":
            require(not all(memory == HOST for _, memory in used), at, "a copy from host to host")
        for name, memory in used:
            if step.kind == HOST:
                require(memory == HOST, at, f"a host step over {name}, which lies in memory {memory}")
            elif step.kind == "graph":
                require(memory != HOST, at, f"a graph step over {name}, which lies in memory host")


def check_order(
    program: Program, where: str, aliases: Mapping[int, Alias] = MappingProxyType({}), changed: Collection[int] = ()
) -> None:
    """Raises manifest-invalid unless every step, and the call's outputs, read what was written before: inputs, weights, state, or
    outputs of earlier steps. No step writes an input, or a value of another step. Copies do not write to weights, nor to inputs
    except whole ones at the positions `changed`, which no later step may read. If an output in `aliases` shares memory with another
    output, that must be written."""
    call_inputs = set(program.inputs)
    written = call_inputs | {index for index, value in enumerate(program.values) if value.memory in PERSISTENT}
    writers: dict[int, int] = {}
    inputs = Spans.of(program.values, program.inputs)
    changing = {program.values[program.inputs[index]]: program.inputs[index] for index in changed}
    gone: set[int] = set()
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        for index in step.inputs:
            require(index in written, at, f"reads value {index}, which nothing has written")
            require(index not in gone, at, f"reads value {index}, which an earlier step has written over")
        for index in set(step.outputs):
            require(index not in call_inputs, at, f"writes value {index}, an input of the call")
            require(index not in writers, at, f"writes value {index}, which steps[{writers.get(index)}] has written")
            writers[index] = place
        written.update(step.outputs)
        if step.kind == "copy":
            target = program.values[step.outputs[0]]
            require(target.memory != "weights", at, "copies into memory weights")
            if target in changing:
                gone.add(changing[target])
                continue
            over = inputs.over(target.memory, *extent(target))
            require(over is None, at, f"copies over value {over}, an input of the call")
    for place, index in enumerate(program.outputs):
        alias = aliases.get(place)
        if alias is not None and alias.memory == "outputs":
            index = program.outputs[alias.index]
        elif alias is not None:
            continue
        require(index in written, f"{where}.outputs[{place}]", f"value {index}, which nothing has written")


# --- lifetimes of values -------------------------------------------------------------------------------------------------


KEPT = {
    "weights": "which no call changes",
    "state": "not all of it in one buffer that `mutated_buffers` names",
    "inputs": "not all of it in one input that `mutated_inputs` names",
}
"""Memories that recordings must not write to, and the message."""


def check_lifetimes(program: Program, where: str) -> None:
    """Raises manifest-invalid if a step overwrites what a later step or the call's outputs need. Outputs of a host or copy step
    must not overlap its inputs or each other; a recording has its own order, and outputs that are views. Needs `check_order`."""
    last, values = _last_reads(program), program.values
    rows: dict[str, list[tuple[int, int, int, int, int]]] = {}
    for number, step in enumerate(program.steps):
        inputs = Spans.of(values, step.inputs if step.kind != "graph" else ())
        for index in step.outputs:
            memory, (begin, end) = values[index].memory, extent(values[index])
            other = inputs.over(memory, begin, end)
            if other is not None:
                _refuse_own(where, number, index, other)
            if begin < end:
                rows.setdefault(memory, []).append((begin, end, number, last.get(index, -1), index))
    for memory_rows in rows.values():
        _check_memory(program, memory_rows, where)


def _check_memory(program: Program, rows: list[tuple[int, int, int, int, int]], where: str) -> None:
    """`rows`: (begin, end, writing step, last reading step, index) of the values in one memory. Sweeps over the addresses with the
    current values sorted by writing step. While no error is found, each value is dead before the next one is written, so that a new
    value is compared with its two neighbours only."""
    writers: list[int] = []
    live: dict[int, list[tuple[int, int, int]]] = {}  # by writer: (-last step that reads, end, index), a heap

    def is_live(at: int, begin: int) -> bool:
        """Whether writer number `at` still has a value at `begin`; removes it otherwise."""
        heap = live[writers[at]]
        while heap and heap[0][1] <= begin:
            heappop(heap)
        if not heap:
            del live[writers.pop(at)]
        return bool(heap)

    for begin, end, writer, reader, index in sorted(rows):
        at = bisect_left(writers, writer)
        while at and not is_live(at - 1, begin):
            at -= 1
        if at and (last := -live[writers[at - 1]][0][0]) > writer:
            _refuse(program, where, writer, index, live[writers[at - 1]][0][2], last)
        while at < len(writers) and not is_live(at, begin):
            pass
        if at < len(writers) and writers[at] == writer:
            if program.steps[writer].kind != "graph":
                _refuse_own(where, writer, index, live[writer][0][2])
            at += 1
            while at < len(writers) and not is_live(at, begin):
                pass
        if at < len(writers) and reader > writers[at]:
            _refuse(program, where, writers[at], live[writers[at]][0][2], index, reader)
        if writer not in live:
            live[writer] = []
            insort(writers, writer)
        heappush(live[writer], (-reader, end, index))


def _refuse_own(where: str, writer: int, index: int, other: int) -> NoReturn:
    at = f"{where}.steps[{writer}]"
    raise BundleError("manifest-invalid", f"{at}: value {index}, an output, lies over value {other} of this step")


def _refuse(program: Program, where: str, writer: int, index: int, other: int, reader: int) -> NoReturn:
    later = _reader(program, reader)
    raise BundleError("manifest-invalid", f"{where}.steps[{writer}]: writes value {index} over value {other}, which {later}")


def check_overwrites(program: Program, place: int, table: Table) -> None:
    """Raises table-invalid if the recording of step `place` uses a value that a later step needs: if a memset or memcpy writes over
    it, or a kernel argument points into it and it is not the step's. Needs `check_recording`."""
    last, step = _last_reads(program), program.steps[place]
    before = {index for earlier in program.steps[:place] for index in earlier.outputs}
    alive = [index for index in before if last.get(index, -1) > place]
    if not alive:
        return
    living, step_spans = Spans.of(program.values, alive), Spans.of(program.values, (*step.inputs, *step.outputs))
    for memory, begin, size in written(table):
        index = living.over(memory, begin, begin + size)
        if index is not None:
            text = f"a node writes over value {index}, which {_reader(program, last[index])}"
            raise BundleError("table-invalid", f"{table.where}: {text}")
    for memory, begin in points(table):
        index = living.over(memory, begin, begin + 1)
        if index is not None and step_spans.over(memory, begin, begin + 1) is None:
            text = f"a node uses value {index}, which {_reader(program, last[index])}, and the step does not name it"
            raise BundleError("table-invalid", f"{table.where}: {text}")


def changed_rows(manifest: Manifest, entry: EntrySpec) -> list[tuple[str, int, int]]:
    """(memory, begin, end) of the state that calls of the entry change."""
    rows = [manifest.weights[index] for index in entry.mutated_buffers]
    return [(row.memory, row.offset, row.offset + span(row)) for row in rows]


def writable(manifest: Manifest, entry: EntrySpec, program: Program) -> Cover:
    """What recordings of the program may write to outside the arena: state and inputs that calls change, and values that copy steps
    put into memory inputs (`check_order`: over no unchanged input)."""
    chosen = [program.inputs[index] for index in entry.mutated_inputs]
    chosen += [index for step in program.steps if step.kind == "copy" for index in step.outputs]
    values = [program.values[index] for index in chosen]
    rows = [(value.memory, *extent(value)) for value in values if value.memory == "inputs"]
    return Cover([*rows, *changed_rows(manifest, entry)])


def check_targets(table: Table, allowed: Cover) -> None:
    """Raises table-invalid if a memset or memcpy of any graph or body writes to weights, or to inputs or state outside `allowed`.
    Needs `check_recording`."""
    from ..format.table import MEMCPY, MEMSET
    from .recordings import node_path

    for number, (memory, begin, size) in enumerate(written(table)):
        if memory in KEPT and not allowed.holds(memory, begin, begin + size):
            memsets = table.counts["memsets"]
            where = node_path(table, MEMSET, number) if number < memsets else node_path(table, MEMCPY, number - memsets)
            text = f"writes bytes {begin} to {begin + size} of memory {memory}, {KEPT[memory]}"
            raise BundleError("table-invalid", f"{where}: {text}")


def _last_reads(program: Program) -> dict[int, int]:
    """The last step that reads each value; the number of steps for an output of the call."""
    last = {index: place for place, step in enumerate(program.steps) for index in step.inputs}
    return last | dict.fromkeys(program.outputs, len(program.steps))


def _reader(program: Program, place: int) -> str:
    return "is an output of the call" if place == len(program.steps) else f"steps[{place}] reads"


def points(table: Table) -> Iterator[tuple[str, int]]:
    """(memory, offset) of every kernel argument and every source of a memcpy."""
    rows = zip(table.relocation_memory, table.relocation_offset, strict=True)
    for memory, offset in sorted({*rows, *zip(table.memcpy_memory[::2], table.memcpy_offset[::2], strict=True)}):
        yield MEMORIES[memory], offset


def written(table: Table) -> Iterator[tuple[str, int, int]]:
    """(memory, offset, bytes) that memsets and memcpys write, from the first byte to the last."""
    for row in range(table.counts["memsets"]):
        width, rows = table.memset_width[row] * table.memset_element[row], table.memset_height[row]
        size = (rows - 1) * table.memset_pitch[row] + width
        yield MEMORIES[table.memset_memory[row]], table.memset_offset[row], size
    for row in range(table.counts["memcpys"]):
        width, rows, slices = table.memcpy_extent[3 * row : 3 * row + 3]
        pitch, height = table.memcpy_pitch[4 * row + 2 : 4 * row + 4]
        size = ((slices - 1) * height + rows - 1) * pitch + width
        yield MEMORIES[table.memcpy_memory[2 * row + 1]], table.memcpy_offset[2 * row + 1], size
