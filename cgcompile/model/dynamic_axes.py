"""Which axes of the inputs are dynamic: found by calling inputs() at several sizes and comparing shapes.

Also outputs of sizes that depend on data, as a bundle has them: filled up with zeros to a bound, with the true sizes behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cgbundle.format.schema import Size, Sizes
from cgbundle.format.size_expressions import evaluate, linear

from ..errors import ModelError
from .source import Sample, Source, sample


def probe_sizes(sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes that export sees: the largest of each dimension, and at least 2, because export treats 1 as a constant.

    Distinct dimensions get distinct values where possible, so that export cannot take one for the other.
    """
    return {name: max(2, values[-1]) for name, values in sizes.items()}


def input_shapes(source: Source, sizes: Mapping[str, Sequence[int]]) -> list[tuple[Size, ...]]:
    """The shape of every input in terms of the declared dimensions.

    Raises dimension-unused, shape-irregular, or source-invalid when the nesting itself changes with a size.
    """
    base = probe_sizes(sizes)
    first = sample(source, base)
    shapes: list[list[Size]] = [list(tensor.shape) for tensor in first.tensors]
    for name in source.dimensions:
        used = False
        # two more values, beside the base: a line through the first two must meet the third
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
    """`scale * name + offset` as a Size."""
    size: Size = name if scale == 1 else ("*", name, scale)
    return ("+", size, offset) if offset > 0 else ("-", size, -offset) if offset < 0 else size


def _line(points: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """(scale, offset) of the line with scale >= 0 through the points, or None."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    scale, rest = divmod(y1 - y0, x1 - x0)
    offset = y0 - scale * x0
    fits = all(y == scale * x + offset for x, y in points)
    return (scale, offset) if rest == 0 and scale >= 0 and fits else None


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
    """Axis `axis` of output `output` has `bound` elements at the most.  How many it has is output number `count`, behind all that
    the model returns: int64 of no axes."""

    output: int
    axis: int
    count: int
    bound: Size


def names_of_counts(names: Sequence[str], rows: Sequence[BoundedAxis]) -> list[str]:
    """The names of the counts, in order: `boxes.rows` of the first output that has so many rows, `boxes.size1` of another axis."""
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
    """The shapes of the outputs filled up, and of the counts.  `sizes`: of the declared dimensions."""
    padded_shapes = [list(shape) for shape in shapes]
    for row in rows:
        padded_shapes[row.output][row.axis] = evaluate(row.bound, sizes)
    return [*[tuple(shape) for shape in padded_shapes], *[() for _ in {row.count for row in rows}]]


def bounded_outputs(
    outputs: Sequence[torch.Tensor], rows: Sequence[BoundedAxis], sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """The outputs of the model filled up, and the counts."""
    shapes = bounded_shapes([tuple(output.shape) for output in outputs], rows, sizes)
    padded_outputs = list(outputs)
    for index in {row.output for row in rows}:
        true = outputs[index]
        padded_outputs[index] = true.new_zeros(shapes[index])
        padded_outputs[index][tuple([slice(0, size) for size in true.shape])] = true
    counts = {row.count: outputs[row.output].shape[row.axis] for row in rows}
    first = outputs[rows[0].output]
    return (*padded_outputs, *[torch.tensor(counts[count], dtype=torch.int64, device=first.device) for count in sorted(counts)])


def sizes_of(tensors: Sequence[torch.Tensor], shapes: Sequence[Sizes]) -> dict[str, int]:
    """The declared dimensions of inputs whose shapes are these."""
    sizes: dict[str, int] = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        for actual, size in zip(tensor.shape, shape, strict=True):
            if rule := linear(size):
                name, scale, offset = rule
                sizes[name] = (int(actual) - offset) // scale
    return sizes
