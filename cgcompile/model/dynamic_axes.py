"""Finds the dynamic axes of the inputs: calls inputs() at several sizes and compares the shapes.

Also describes outputs with sizes that depend on data.  A bundle pads them with zeros to a bound, and returns also the true sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cgbundle.format.schema import Size, Sizes
from cgbundle.format.shapes import evaluate, linear

from ..errors import ModelError
from .source import Sample, Source, sample


def probe_sizes(sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the sizes for the export: the largest of each dimension, and at least 2, because export treats 1 as a constant."""
    return {name: max(2, values[-1]) for name, values in sizes.items()}


def input_shapes(source: Source, sizes: Mapping[str, Sequence[int]]) -> list[tuple[Size, ...]]:
    """Returns the shape of every input in terms of the declared dimensions.  Raises dimension-unused, shape-irregular, or
    source-invalid if the nesting changes with a size."""
    base = probe_sizes(sizes)
    first = sample(source, base)
    shapes: list[list[Size]] = [list(tensor.shape) for tensor in first.tensors]
    for name in source.dimensions:
        used = False
        # three sizes: a line through two of the points must contain the third
        others = [max(1, base[name] - 1), base[name] + 1]
        probes = [(value, sample(source, {**base, name: value})) for value in others]
        for _, other in probes:
            _same_structure(source, first, other, name)
        for index, (path, tensor) in enumerate(first.leaves):
            for axis in range(tensor.dim()):
                points = [(base[name], tensor.shape[axis]), *[(value, other.tensors[index].shape[axis]) for value, other in probes]]
                rule = _line(points)
                if rule is None or (rule != (0, tensor.shape[axis]) and not isinstance(shapes[index][axis], int)):
                    raise ModelError(
                        "shape-irregular",
                        f"{source.label}: input {path!r}, axis {axis}: sizes {[size for _, size in points]} at {name}="
                        f"{[value for value, _ in points]} are not a multiple of one dimension plus a constant",
                    )
                if rule[0]:
                    used = True
                    shapes[index][axis] = expression(name, *rule)
        if not used:
            raise ModelError(
                "dimension-unused",
                f"{source.label}: dimension {name!r} changes no shape of the inputs",
                f"use {name} in a shape, or remove the parameter",
            )
    return [tuple(shape) for shape in shapes]


def expression(name: str, scale: int, offset: int) -> Size:
    """Returns `scale * name + offset` as a Size."""
    size: Size = name if scale == 1 else ("*", name, scale)
    return ("+", size, offset) if offset > 0 else ("-", size, -offset) if offset < 0 else size


def _line(points: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns (scale, offset) of the line through the points, with scale >= 0, or None."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    scale, remainder = divmod(y1 - y0, x1 - x0)
    offset = y0 - scale * x0
    fits = all(y == scale * x + offset for x, y in points)
    return (scale, offset) if remainder == 0 and scale >= 0 and fits else None


def _same_structure(source: Source, first: Sample, other: Sample, name: str) -> None:
    same = first.call == other.call and [tensor.dim() for tensor in first.tensors] == [tensor.dim() for tensor in other.tensors]
    if not same or [tensor.dtype for tensor in first.tensors] != [tensor.dtype for tensor in other.tensors]:
        raise ModelError(
            "source-invalid", f"{source.label}: the nesting, ranks, dtypes or constants of the inputs change with {name}"
        )
    for path, attribute, value in first.contexts:
        if (path, attribute, value) not in other.contexts:
            raise ModelError(
                "source-invalid", f"{source.label}: input {path!r}: its {attribute}, {value!r}, changes with {name}",
                "arguments that are not tensors must be the same at all sizes",
            )  # fmt: skip


# --- outputs of sizes that depend on data ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedAxis:
    """An axis of an output that has at most `bound` elements.  Its true size is extra output number `count`, an int64 scalar
    tensor.  Extra outputs come after those of the model."""

    output: int
    axis: int
    count: int
    bound: Size


def names_of_counts(names: Sequence[str], rows: Sequence[BoundedAxis]) -> list[str]:
    """Returns the names of the true sizes.  A name begins with that of the first output of this size: `boxes.rows` for axis 0,
    `boxes.size1` for axis 1."""
    by_count: dict[int, str] = {}
    for row in rows:
        if row.count not in by_count:
            name = f"{names[row.output]}.{'rows' if row.axis == 0 else f'size{row.axis}'}"
            while name in names:
                name += "_"
            by_count[row.count] = name
    return [by_count[count] for count in sorted(by_count)]


def bounded_shapes(
    shapes: Sequence[tuple[int, ...]], rows: Sequence[BoundedAxis], sizes: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of `bounded_outputs`.  `sizes` are those of the declared dimensions."""
    padded_shapes = [list(shape) for shape in shapes]
    for row in rows:
        padded_shapes[row.output][row.axis] = evaluate(row.bound, sizes)
    return [*[tuple(shape) for shape in padded_shapes], *[() for _ in {row.count for row in rows}]]


def bounded_outputs(
    outputs: Sequence[torch.Tensor], rows: Sequence[BoundedAxis], sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of the model, padded to their bounds, and the true sizes of the bounded axes."""
    shapes = bounded_shapes([tuple(output.shape) for output in outputs], rows, sizes)
    padded_outputs = list(outputs)
    for index in {row.output for row in rows}:
        unpadded = outputs[index]
        padded_outputs[index] = unpadded.new_zeros(shapes[index])
        padded_outputs[index][tuple([slice(0, size) for size in unpadded.shape])] = unpadded
    counts = {row.count: outputs[row.output].shape[row.axis] for row in rows}
    first = outputs[rows[0].output]
    return (*padded_outputs, *[torch.tensor(counts[count], dtype=torch.int64, device=first.device) for count in sorted(counts)])


def sizes_of(tensors: Sequence[torch.Tensor], shapes: Sequence[Sizes]) -> dict[str, int]:
    """Returns the sizes of the declared dimensions of inputs with these symbolic shapes."""
    sizes: dict[str, int] = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        for actual, size in zip(tensor.shape, shape, strict=True):
            if rule := linear(size):
                name, scale, offset = rule
                sizes[name] = (int(actual) - offset) // scale
    return sizes
