"""The result of an export: programs, and their signature in terms of the declared dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from cgbundle.format.schema import DataSize, IntKey, Parameter, Size, TensorSpec, Tree

from ..model.flat_module import FlatModule
from ..model.side_effects import Obstacle
from ..model.source import SEED, Source, all_keys, sample
from .programs import Programs

EagerShapes = tuple[dict[str, int], list[tuple[int, ...]]]
"""Sizes of the dimensions, and the output shapes of eager PyTorch at these sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The exported model, which the checks read.

    `programs` take and return flat tensors; so does `flat`, which runs the user's module in eager PyTorch.  `shapes`: the shapes of
    the inputs.  `eager_shapes`: output shapes, at least at the smallest and largest sizes.  `obstacles`: side effects for which the
    programs have no operation.  `unbounded`: why outputs whose sizes depend on data have no bound, or "".  `baked`: name of a
    parameter or buffer whose value Python read during export -> the line that read it.  `written`: parameters and buffers that a
    call may write to.
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

    @property
    def keys(self) -> tuple[IntKey, ...]:
        """The int_keys, in order."""
        return tuple(all_keys(self.sizes))

    def sizes_at(self, key: IntKey) -> dict[str, int]:
        """Returns the size of every dimension at an int_key."""
        return dict(zip(self.sizes, key, strict=True))

    def inputs_at(self, key: IntKey, seed: int = SEED) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the example inputs at an int_key."""
        return sample(self.source, self.sizes_at(key), seed).tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """Inputs and outputs in terms of the declared dimensions, the pytrees of the call and the result, and the call's parameters.
    `data_sizes`: sizes that depend on data, of outputs that are padded to a bound."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Tree
    parameters: tuple[Parameter, ...]
    result: Tree
    data_sizes: tuple[DataSize, ...] = ()


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the axes from outermost to innermost in memory; the row-major order if the tensor is not dense in any order."""
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis)))
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else tuple(range(tensor.dim()))
