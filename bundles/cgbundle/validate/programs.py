"""Every invariant of a manifest's programs but those of their steps: their keys, values, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod

from ..errors import BundleError
from ..format import limits
from ..format.safetensors import nbytes
from ..format.schema import EntrySpec, Manifest, Program, TensorSpec, Value, Weight
from ..format.size_expressions import evaluate, operands
from ..format.spans import span
from ..tensors.tensor import is_dense
from . import require
from .steps import check_steps


def check_programs(manifest: Manifest, entry: EntrySpec) -> None:
    """Raises manifest-invalid unless the programs are sound."""
    count = prod(len(dimension.sizes) for dimension in entry.dimensions)
    require(len(entry.programs) == count, "programs", f"{len(entry.programs)}, the dimensions' sizes make {count}")
    keys = list(product(*[dimension.sizes for dimension in entry.dimensions]))
    found = [program.key for program in entry.programs]
    require(found == keys, "programs", f"keys {found[:4]}... are not the product of the dimensions' sizes")
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
