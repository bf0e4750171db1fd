"""Block pointers and tensor descriptors: a block of a strided tensor in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl

from . import values
from .values import Array, Handle


@dataclass(frozen=True, slots=True)
class BlockPointer:
    """`base`: the tensor's address.  `shape`, `strides` (in elements), `offsets`: a scalar per axis.  `padding`: Triton's option
    for elements outside the tensor."""

    base: Handle
    shape: tuple[Handle, ...]
    strides: tuple[Handle, ...]
    offsets: tuple[Handle, ...]
    block: tuple[int, ...]
    padding: Any = None

    def moved(self, by: Sequence[Handle]) -> BlockPointer:
        """The block `by` elements further along each axis."""
        pairs = zip(self.offsets, by, strict=True)
        return self.at([Handle(old.data.astype(np.int64) + step.data, tl.int64) for old, step in pairs])

    def at(self, offsets: Sequence[Handle]) -> BlockPointer:
        return dataclasses.replace(self, offsets=tuple(offsets))

    def elements(self, checked: Iterable[int]) -> tuple[Handle, Handle | None]:
        """Returns the address of every element, and a mask of elements inside the tensor along the axes `checked`, or None if there
        are no such axes."""
        rank = len(self.block)
        size = self.base.dtype.element_ty.primitive_bitwidth // 8
        places = self.base.data.reshape(-1, *(1,) * rank)
        inside: Array = np.ones((1,) * (rank + 1), bool)
        for axis in range(rank):
            axis_shape = [1] * rank
            axis_shape[axis] = self.block[axis]
            start: Array = self.offsets[axis].data.astype(np.int64).reshape(-1, *(1,) * rank)
            index = start + np.arange(self.block[axis]).reshape(1, *axis_shape)
            places = places + size * index * self.strides[axis].data.reshape(-1, *(1,) * rank)
            if axis in checked:
                inside = inside & (index >= 0) & (index < self.shape[axis].data.reshape(-1, *(1,) * rank))
        mask = Handle(np.broadcast_to(inside, (len(inside), *self.block)), tl.int1) if checked else None
        return Handle(places, self.base.dtype), mask

    def filling(self, padding: Any) -> Handle | None:
        """The value of elements outside the tensor: zero, NaN, or None if a kernel must not use them."""
        if padding is None:
            return None
        dtype = self.base.dtype.element_ty
        number = np.nan if padding.name == "PAD_NAN" else 0
        return Handle(np.full((1,) * (len(self.block) + 1), number).astype(values.working(dtype)), dtype)
