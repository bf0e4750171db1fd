"""Every invariant of a manifest's programs: their keys, values, inputs and outputs; and what each step may read and write, and in
which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from types import MappingProxyType

from ..errors import BundleError
from ..format import limits
from ..format.safetensors import nbytes
from ..format.schema import HOST, PERSISTENT, Alias, EntrySpec, Manifest, Program, Region, Step, TensorSpec, Value, Weight
from ..format.size_expressions import evaluate, operands
from ..format.spans import Cover, Spans, extent, is_dense, span
from . import require
from .lifetimes import changed_rows, check_lifetimes


def check_programs(manifest: Manifest, entry: EntrySpec) -> None:
    """Raises manifest-invalid unless the programs are sound."""
    count = prod(len(dimension.sizes) for dimension in entry.dimensions)
    require(len(entry.programs) == count, "programs", f"{len(entry.programs)}, the dimensions' sizes make {count}")
    keys = list(product(*[dimension.sizes for dimension in entry.dimensions]))
    program_keys = [program.key for program in entry.programs]
    require(program_keys == keys, "programs", f"keys {program_keys[:4]}... are not the product of the dimensions' sizes")
    for index, program in enumerate(entry.programs):
        _check_program(manifest, entry, program, f"programs[{index}]")


def check_size_evaluations(entries: Sequence[EntrySpec]) -> None:
    """Raises manifest-invalid where the shapes of all entries cost too much to work out."""
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
            expected = _shape(spec, sizes, at)
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
    """One of those that were timed is the program; of each there is a time for every graph, or a reason."""
    names = [lowering.name for lowering in program.lowerings]
    require(len(set(names)) == len(names), f"{where}.lowerings", "a name stands twice")
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
    """Every input of the call is a value of its own.  On a GPU they lie beside each other in memory `inputs`; on a CPU all values
    are those of the call."""
    if target == "cpu":
        whole = sorted((*program.inputs, *program.outputs)) == list(range(len(program.values)))
        require(whole, f"{where}.values", "of a cpu program each is one input or one output of the call")
        return
    places = []
    for place, index in enumerate(program.inputs):
        value = program.values[index]
        if not span(value):
            continue  # an input without elements lies nowhere
        require(value.memory == "inputs", f"{where}.inputs[{place}]", f"lies in memory {value.memory}, not in inputs")
        places.append((value.offset, value.offset + span(value), place))
    require(len(set(program.inputs)) == len(program.inputs), f"{where}.inputs", "a value stands twice")
    for (_, end, _), (begin, _, place) in pairwise(sorted(places)):
        require(end <= begin, f"{where}.inputs[{place}]", "lies over another input of the call")


def _shape(spec: TensorSpec, sizes: Mapping[str, int], where: str) -> tuple[int, ...]:
    try:
        return tuple([evaluate(size, sizes) for size in spec.shape])
    except ZeroDivisionError:
        raise BundleError("manifest-invalid", f"{where}: the signature's shape divides by zero at {dict(sizes)}") from None


def _check_value(manifest: Manifest, memories: dict[str, int], value: Value, where: str, *, alias: bool) -> None:
    """`alias`: it is an output that shares memory, whose offset on the cpu target counts from what it shares that with."""
    require(value.memory != "peer", f"{where}.memory", "a value in memory peer, where addresses alone lie")
    size = checked_span(where, value)
    if manifest.target.kind == "cpu":
        require(value.memory == "host", f"{where}.memory", f"a value of the cpu target in memory {value.memory}")
        require(value.offset == 0 or alias, f"{where}.offset", "a value in host memory has none")
    else:
        fits = value.offset >= 0 and value.offset + size <= memories.get(value.memory, 0)
        require(fits, f"{where}.offset", f"outside memory {value.memory}")


def checked_span(where: str, row: Value | Weight) -> int:
    """The span of a value or weight.  Raises manifest-invalid for a shape and strides of no tensor."""
    require(len(row.shape) == len(row.strides), f"{where}.strides", "do not match the shape")
    require(min(row.shape, default=0) >= 0 and min(row.strides, default=0) >= 0, where, "negative size or stride")
    size = span(row)
    small = max(row.offset + size, nbytes(row.dtype, row.shape)) < limits.INTEGER
    require(small, where, "more bytes than 64 bits count")
    return size


# --- steps ----------------------------------------------------------------------------------------------------------


def check_steps(manifest: Manifest, entry: EntrySpec, program: Program, where: str) -> None:
    """Raises manifest-invalid unless the program's steps are sound; `where` is the program's path in the manifest."""
    require(bool(program.steps), f"{where}.steps", "no step")
    changing = Cover(changed_rows(manifest, entry))
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        require(all(0 <= value < len(program.values) for value in (*step.inputs, *step.outputs)), at, "no such value")
        require((step.kind == "graph") == bool(step.file), f"{at}.file", "a graph step has a table, others none")
        if step.kind == "copy":
            _check_copy(program, step, changing, at)
        else:
            _check_region(manifest.regions, step, at)
    if manifest.target.kind == "cpu":
        (step, *more) = program.steps
        whole = step.kind == HOST and not more and step.inputs == program.inputs and step.outputs == program.outputs
        require(whole, f"{where}.steps", "a cpu program is one host step over the call's values")
    else:
        _check_sides(program, where)
        check_order(program, where, {alias.output: alias for alias in entry.aliases}, entry.mutated_inputs)
        check_lifetimes(program, where)


def _check_copy(program: Program, step: Step, changing: Cover, at: str) -> None:
    require(len(step.inputs) == len(step.outputs) == 1, at, "a copy has one input and one output")
    source, target = program.values[step.inputs[0]], program.values[step.outputs[0]]
    same = (source.dtype, source.shape, source.strides) == (target.dtype, target.shape, target.strides)
    require(same, at, "a copy between values of different layouts")
    known = target.memory != "state" or not span(target) or changing.holds(target.memory, *extent(target))
    require(known, at, "copies into memory state, outside of the buffers that `mutated_buffers` names")


def _check_region(regions: tuple[Region, ...], step: Step, at: str) -> None:
    require(0 <= step.region < len(regions), f"{at}.region", f"no region {step.region}")
    require(regions[step.region].kind == step.kind, f"{at}.region", "is of another kind")


def _check_sides(program: Program, where: str) -> None:
    """The host and the GPU meet in copies alone: a call's values and those of graph steps lie on the GPU, those of host steps do
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
    """Raises manifest-invalid unless every step, and the call in the end, reads what was written before.

    These are inputs of the call, weights and state, and outputs of earlier steps.  Every value is written once, and by no step the
    call's inputs; a copy leaves weights and the call's inputs as they are.  Those inputs that the call changes, at the positions
    `changed`, may be copied over as a whole, and no later step reads what was there.  What the `aliases`, by output, lie in is
    written.
    """
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
