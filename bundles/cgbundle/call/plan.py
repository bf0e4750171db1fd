"""From the shapes of a call to the replays that serve it, with the slices of every input and output.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ..errors import CallError
from ..format.schema import EntrySpec, Size
from ..format.size_expressions import evaluate, linear
from . import dispatch
from .guards import call_sizes, where_declared

Slices = tuple[slice, ...]
Shape = tuple[int, ...]


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
    sizes = call_sizes(entry, shapes)
    dimensions = entry.dimensions
    named = {dimension.name: size for dimension, size in zip(dimensions, sizes, strict=True)}
    keys = {program.key: index for index, program in enumerate(entry.programs)}
    parts = []
    for piece in dispatch.plan(dimensions, sizes, on_miss, partial(where_declared, entry)):
        starts = {dimension.name: cut.start for dimension, cut in zip(dimensions, piece, strict=True)}
        lengths = {dimension.name: cut.length for dimension, cut in zip(dimensions, piece, strict=True)}
        recorded = {dimension.name: cut.size for dimension, cut in zip(dimensions, piece, strict=True)}
        inputs = tuple(
            [
                (_ranges(spec.shape, starts, lengths), tuple([evaluate(size, recorded) for size in spec.shape]))
                for spec in entry.inputs
            ]
        )
        outputs = tuple(
            [
                (tuple([slice(0, evaluate(size, lengths)) for size in spec.shape]), _ranges(spec.shape, starts, lengths))
                for spec in entry.outputs
            ]
        )
        parts.append(Part(keys[tuple(recorded.values())], inputs, outputs))
    exact = len(parts) == 1 and sizes in keys
    return Plan(exact, tuple([tuple([evaluate(size, named) for size in spec.shape]) for spec in entry.outputs]), tuple(parts))


def number_of_key(entry: EntrySpec, key: tuple[int, ...]) -> int:
    """The position of the program of an int_key.  Raises key-missing, with the keys that there are."""
    keys = [program.key for program in entry.programs]
    if not isinstance(key, tuple) or key not in keys:
        listed = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
        raise CallError("key-missing", f"expected a recorded int_key ({listed}), got {key!r}")
    return keys.index(key)


def _ranges(shape: Sequence[Size], starts: dict[str, int], lengths: dict[str, int]) -> Slices:
    """Where a piece lies in a whole tensor.  Only sizes that are a multiple of one dimension are ever cut (the build proves it)."""
    ranges = []
    for size in shape:
        rule = linear(size)
        start = rule[1] * starts[rule[0]] if rule else 0
        ranges.append(slice(start, start + evaluate(size, lengths)))
    return tuple(ranges)
