"""Outputs of sizes that depend on data, as a bundle has them: filled up with zeros to a bound, with the true sizes behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cgbundle.format.schema import Size, Sizes
from cgbundle.format.size_expressions import evaluate, linear


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
    made: dict[int, str] = {}
    for row in rows:
        if row.count not in made:
            name = f"{names[row.output]}.{'rows' if row.axis == 0 else f'size{row.axis}'}"
            while name in names:
                name += "_"
            made[row.count] = name
    return [made[count] for count in sorted(made)]


def bounded_shapes(
    shapes: Sequence[tuple[int, ...]], rows: Sequence[BoundedAxis], sizes: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """The shapes of the outputs filled up, and of the counts.  `sizes`: of the declared dimensions."""
    made = [list(shape) for shape in shapes]
    for row in rows:
        made[row.output][row.axis] = evaluate(row.bound, sizes)
    return [*[tuple(shape) for shape in made], *[() for _ in {row.count for row in rows}]]


def bounded_outputs(
    outputs: Sequence[torch.Tensor], rows: Sequence[BoundedAxis], sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """The outputs of the model filled up, and the counts."""
    shapes = bounded_shapes([tuple(output.shape) for output in outputs], rows, sizes)
    made = list(outputs)
    for index in {row.output for row in rows}:
        true = outputs[index]
        made[index] = true.new_zeros(shapes[index])
        made[index][tuple([slice(0, size) for size in true.shape])] = true
    counts = {row.count: outputs[row.output].shape[row.axis] for row in rows}
    first = outputs[rows[0].output]
    return (*made, *[torch.tensor(counts[count], dtype=torch.int64, device=first.device) for count in sorted(counts)])


def sizes_of(tensors: Sequence[torch.Tensor], shapes: Sequence[Sizes]) -> dict[str, int]:
    """The declared dimensions of inputs whose shapes are these."""
    found: dict[str, int] = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        for actual, size in zip(tensor.shape, shape, strict=True):
            if rule := linear(size):
                name, scale, offset = rule
                found[name] = (int(actual) - offset) // scale
    return found
