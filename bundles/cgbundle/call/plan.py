"""From the shapes of a call to the replays that serve it, with the slices of every input and output.  Pure.

Guards compare dtypes, devices and shapes with the signature, and give the sizes of the declared dimensions.  Errors name the input,
the axis, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ..errors import CallError
from ..format.schema import EntrySpec, Size, TensorSpec
from ..format.size_expressions import evaluate, linear, text
from ..tensors.library import Descriptor

Slices = tuple[slice, ...]
Shape = tuple[int, ...]

POLICIES = ("pad", "chunk", "error")


class Part(NamedTuple):
    """One replay: the position of its program; of every input the slices that it takes and the recorded shape; of every output the
    slices of the replay's output that count, and where they go in the call's."""

    program: int
    inputs: tuple[tuple[Slices, Shape], ...]
    outputs: tuple[tuple[Slices, Slices], ...]


class Plan(NamedTuple):
    """What a call does.  `exact`: one recorded key serves it as it is.  `shapes`: of the call's outputs."""

    exact: bool
    shapes: tuple[Shape, ...]
    parts: tuple[Part, ...]


def plan(entry: EntrySpec, shapes: Sequence[Sequence[int]], on_miss: str) -> Plan:
    """The plan for inputs of `shapes`.  Raises input-shape, dimension-disagrees, key-missing."""
    sizes, names = call_sizes(entry, shapes), [dimension.name for dimension in entry.dimensions]
    keys = {program.key: index for index, program in enumerate(entry.programs)}
    replays: Sequence[Sequence[tuple[int, int, int]]] = [[(0, size, size) for size in sizes]]
    if sizes not in keys:
        from .pieces import pieces  # many programs are called at recorded sizes alone

        replays = pieces(entry.dimensions, sizes, on_miss, partial(where_declared, entry))
    parts = []
    for piece in replays:
        starts, lengths, recorded = [{name: chunk[field] for name, chunk in zip(names, piece, strict=True)} for field in range(3)]
        inputs = [(_ranges(spec.shape, starts, lengths), _shape(spec, recorded)) for spec in entry.inputs]
        outputs = [
            (tuple([slice(0, size) for size in _shape(spec, lengths)]), _ranges(spec.shape, starts, lengths))
            for spec in entry.outputs
        ]
        parts.append(Part(keys[tuple(recorded.values())], tuple(inputs), tuple(outputs)))
    whole = dict(zip(names, sizes, strict=True))
    exact = len(parts) == 1 and sizes in keys
    return Plan(exact, tuple([_shape(spec, whole) for spec in entry.outputs]), tuple(parts))


def number_of_key(entry: EntrySpec, key: tuple[int, ...]) -> int:
    """The position of the program of an int_key.  Raises key-missing, with the keys that there are."""
    keys = [program.key for program in entry.programs]
    if not isinstance(key, tuple) or key not in keys:
        known = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
        raise CallError("key-missing", f"expected a recorded int_key ({known}), got {key!r}")
    return keys.index(key)


def _shape(spec: TensorSpec, sizes: dict[str, int]) -> Shape:
    return tuple([evaluate(size, sizes) for size in spec.shape])


def _ranges(shape: Sequence[Size], starts: dict[str, int], lengths: dict[str, int]) -> Slices:
    """Where a piece lies in a whole tensor.  Only sizes that are a multiple of one dimension are chunked (the build proves it)."""
    ranges = []
    for size in shape:
        rule = linear(size)
        start = rule[1] * starts[rule[0]] if rule else 0
        ranges.append(slice(start, start + evaluate(size, lengths)))
    return tuple(ranges)


# --- guards ---------------------------------------------------------------------------------------------------------


def call_sizes(entry: EntrySpec, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sizes of the declared dimensions, in declared order, for inputs of `shapes` (one per input of the signature).

    Raises input-shape or dimension-disagrees.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for spec, shape in zip(entry.inputs, shapes, strict=True):
        if len(shape) != len(spec.shape):
            expected = f"expected {len(spec.shape)} axes {signature(spec)}"
            raise CallError("input-shape", f"input {spec.name!r}: {expected}, got {len(shape)}: {list(shape)}")
        for axis, (size, actual) in enumerate(zip(spec.shape, shape, strict=True)):
            rule, where = linear(size), f"input {spec.name!r}, axis {axis}"
            if rule is None:
                if actual != size:
                    raise CallError("input-shape", f"{where}: expected {text(size)}, got {actual}; the input is {signature(spec)}")
                continue
            name, scale, offset = rule
            value, rest = divmod(actual - offset, scale)
            if rest or value < 0:
                raise CallError("input-shape", f"{where}: expected {text(size)}, which no {name} makes {actual}")
            first = sizes.setdefault(name, (value, where))
            if first[0] != value:
                message = f"{where}: expected {name}={first[0]} as in {first[1]}, got {value}"
                axes = f"the axes of {spec.name!r} that are {name} have to be equal"
                raise CallError("dimension-disagrees", message, axes if f"input {spec.name!r}," in first[1] else "")
    return tuple([sizes[dimension.name][0] for dimension in entry.dimensions])


def where_declared(entry: EntrySpec, dimension: str) -> str:
    """Where a declared dimension first shows in a call: `input 'ids', axis 0`."""
    for spec in entry.inputs:
        for axis, size in enumerate(spec.shape):
            rule = linear(size)
            if rule and rule[0] == dimension:
                return f"input {spec.name!r}, axis {axis}"
    return dimension


def common_device(inputs: Sequence[TensorSpec], descriptors: Sequence[Descriptor], expected: int | None) -> int | None:
    """Where all inputs lie: on the CPU (None), or on CUDA device `expected`, which is the program's.  Raises input-device."""
    device = descriptors[0][4]
    alike = device is None or device == expected
    for descriptor in descriptors:
        if descriptor[4] != device:
            alike = False
    if not alike:
        from ..tensors.input_errors import wrong_device  # only where a call has failed

        raise wrong_device(inputs, descriptors, expected)
    return device


def signature(spec: TensorSpec) -> str:
    """The input's shape as a person would write it: `[batch, 64]`."""
    return "[" + ", ".join(text(size) for size in spec.shape) + "]"
