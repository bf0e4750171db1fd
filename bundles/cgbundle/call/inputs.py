"""The inputs of a replay: laid out as recorded, cut out of the call's and padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..format.schema import TensorSpec
from ..tensors.library import Library
from ..tensors.tensor import is_dense
from .plan import Part


def lay_out(
    library: Library, order: Sequence[int], values: list[Any], index: int, address: int, shape: Any, strides: Sequence[int] | None
) -> int:
    """The address of input `index` with its axes in `order`: its own, or that of a copy that takes its place in `values`."""
    if is_dense(shape, library.strides(values[index]) if strides is None else strides, order):
        return address
    values[index] = library.ordered(values[index], order)
    return library.describe(values[index])[0]


def cut(
    library: Library, device: int | None, specs: Sequence[TensorSpec], part: Part, values: Sequence[Any]
) -> tuple[list[Any], list[int]]:
    """The inputs of a part of the call, padded with zeros to the recorded shapes, and their addresses; the tensors must outlive the
    replay."""
    found: list[Any] = []
    addresses = []
    for index, (value, (slices, shape)) in enumerate(zip(values, part.inputs, strict=True)):
        piece = value[slices] if slices else value  # NumPy makes a number of array[()], in memory of its own
        if tuple(piece.shape) != shape:
            padded = library.empty(specs[index].dtype, shape, device)
            padded[tuple([slice(0, size) for size in piece.shape])] = piece
            piece = padded
        found.append(piece)
        address, sizes, _, strides, _ = library.describe(piece)
        addresses.append(lay_out(library, specs[index].order, found, index, address, sizes, strides))
    return found, addresses
