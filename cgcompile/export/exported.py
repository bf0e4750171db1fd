"""What an export gives: the records that every later stage reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey, Size, TensorSpec, Tree

from ..model.flat_module import Computed, Eager, Flat
from ..model.side_effects import Obstacle
from ..model.source import Sample, Source

Seen = tuple[dict[str, int], list[tuple[int, ...]]]
"""Sizes, and the shapes of the outputs that eager PyTorch gave at them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What torch.export made of a model, before the signature: all that the checks look at.  `shapes` are those of the inputs,
    `seen` what eager PyTorch gave at the smallest and the largest sizes, `obstacles` what leaves no operation in the program."""

    source: Source
    sizes: Mapping[str, tuple[int, ...]]
    program: ExportedProgram
    flat: Flat
    like: Sample
    shapes: tuple[tuple[Size, ...], ...]
    seen: tuple[Seen, ...]
    obstacles: tuple[Obstacle, ...]

    @property
    def call(self) -> Tree:
        """The structure of the call's inputs."""
        return self.like.call


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The exported program over flat tensors, and the signature.  `flat` runs the user's own module in eager PyTorch the same
    way.  `written`: positions of the inputs that the program writes to; `state`: its buffers that it writes to, by their names
    in the program, which are the user's behind PREFIX: the checks find both.
    `aliases`: outputs that share memory (see aliases.py).  `calls`: how often the exam calls each int_key.
    `computed`: the program itself, where it computes its random numbers, which eager PyTorch would draw otherwise."""

    program: ExportedProgram
    flat: Flat
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Tree
    result: Tree
    obstacles: tuple[Obstacle, ...] = ()
    written: tuple[int, ...] = ()
    state: tuple[str, ...] = ()
    calls: int = 1
    computed: Computed | None = None

    @property
    def eager(self) -> Eager:
        """What eager PyTorch runs to know what a call has to give."""
        return self.computed or self.flat

    aliases: tuple[Shared, ...] = ()


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory; row-major where the tensor is not dense in any order."""
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis)))
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else tuple(range(tensor.dim()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A tensor as a look at another: bytes from the other's first element, strides in elements; `base` are the other's own."""

    offset: int
    strides: tuple[int, ...]
    base: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Output number `output` shares memory with number `index` of the `inputs` or `outputs`, or with the weight `name` of the
    user's module (`memory` is then "weights", and for one that calls change "state"); `looks` says how at every int_key."""

    output: int
    memory: str
    index: int
    name: str
    looks: Mapping[IntKey, Look]
