"""What an export gives: the program, and its signature in terms of the declared dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from cgbundle.format.schema import DataSize, Parameter, Size, TensorSpec, Tree

from ..model.flat_module import FlatModule
from ..model.side_effects import Obstacle
from ..model.source import Source
from .programs import Programs

EagerShapes = tuple[dict[str, int], list[tuple[int, ...]]]
"""Sizes, and the shapes of the outputs that eager PyTorch gave at them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What torch.export made of a model: all that the checks look at.

    `programs` are over flat tensors; `flat` runs the user's own module in eager PyTorch the same way.  `shapes` are those of the
    inputs.  `eager_shapes` were found at the smallest and the largest sizes.  `obstacles` leave no operation in a program.
    `unbounded`: why outputs whose sizes depend on data have no bound, "" where none has such a size.
    `baked` are parameters and buffers whose values Python got while it was exported, by their names in the model, with the line
    that asked; `written` are those that a call may write to.
    """

    source: Source
    sizes: Mapping[str, tuple[int, ...]]
    programs: Programs
    flat: FlatModule
    shapes: tuple[tuple[Size, ...], ...]
    eager_shapes: tuple[EagerShapes, ...]
    obstacles: tuple[Obstacle, ...]
    unbounded: str = ""
    baked: Mapping[str, str] = field(default_factory=dict)
    written: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """Inputs and outputs in terms of the declared dimensions, the pytrees of the call and the result, and the call's parameters.
    `data_sizes`: of outputs that are padded to a bound."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Tree
    parameters: tuple[Parameter, ...]
    result: Tree
    data_sizes: tuple[DataSize, ...] = ()


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory; row-major where the tensor is not dense in any order."""
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis)))
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else tuple(range(tensor.dim()))
