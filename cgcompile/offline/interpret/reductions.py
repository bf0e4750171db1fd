"""tl.reduce and tl.associative_scan: apply the combine function to entire blocks, in log2(length) steps.  The function need not be
commutative, so neighbours are combined in order.  A GPU combines in another order and rounds differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from .builder import Builder
from .values import Array, Handle

Combine = Callable[..., Any]

_WHOLE: dict[str, Callable[..., Array]] = {
    "_sum_combine": np.add.reduce,
    "_elementwise_max": np.fmax.reduce,
    "_elementwise_min": np.fmin.reduce,
}
"""NumPy reductions for combine functions of triton.language.standard."""


def reduce(builder: Builder, inputs: tuple[Any, ...], axis: int | None, combine: Any, keep: bool) -> tuple[Any, ...]:
    """Reduces `inputs`, tensors of one shape.  Without `axis`, combines all elements.  `keep`: reduced axes stay, with length 1."""
    shape = [int(size) for size in inputs[0].type.get_block_shapes()]
    data = [item.handle.data for item in inputs]
    dtypes = [item.dtype for item in inputs]
    if axis is None:
        data = [array.reshape(len(array), -1) for array in data]
        result_shape, axis, sizes = ([1] * len(shape) if keep else []), 0, [int(np.prod(shape))]
    else:
        axis %= len(shape)
        result_shape = [1 if i == axis else size for i, size in enumerate(shape) if keep or i != axis]
        sizes = shape
    reduction = _WHOLE.get(combine.fn.__name__) if combine.fn.__module__ == "triton.language.standard" else None
    if reduction is not None:
        data = [reduction(data[0], axis=axis + 1, dtype=data[0].dtype)]
    else:
        function = combine.rewrite()
        while sizes[axis] > 1:
            sizes = [*sizes[:axis], sizes[axis] // 2, *sizes[axis + 1 :]]
            halves = [[_every_second(array, axis + 1, start) for array in data] for start in (0, 1)]
            data = _combined(function, halves[0], halves[1], dtypes, sizes)
        data = [array.take(0, axis=axis + 1) for array in data]
    return tuple(
        tl.tensor(builder.value(array.reshape(len(array), *result_shape), dtype), _type(dtype, result_shape))
        for array, dtype in zip(data, dtypes, strict=True)
    )


def scan(builder: Builder, inputs: tuple[Any, ...], axis: int, combine: Any, reverse: bool) -> tuple[Any, ...]:
    """Inclusive scan, from the end if `reverse`."""
    shape = [int(size) for size in inputs[0].type.get_block_shapes()]
    axis %= len(shape)
    dtypes = [item.dtype for item in inputs]
    data = [np.flip(item.handle.data, axis + 1) if reverse else item.handle.data for item in inputs]
    function = combine.rewrite()
    place = np.arange(shape[axis]).reshape(*(1,) * (axis + 1), -1, *(1,) * (len(shape) - axis - 1))
    step = 1
    while step < shape[axis]:
        moved = [np.roll(array, step, axis + 1) for array in data]
        combined = _combined(function, moved, data, dtypes, shape)
        data = [np.where(place >= step, new, old) for new, old in zip(combined, data, strict=True)]
        step *= 2
    return tuple(
        tl.tensor(builder.value(np.flip(array, axis + 1) if reverse else array, dtype), _type(dtype, shape))
        for array, dtype in zip(data, dtypes, strict=True)
    )


def _combined(function: Combine, left: list[Array], right: list[Array], dtypes: list[Any], shape: list[int]) -> list[Array]:
    tensors = [
        tl.tensor(Handle(array, dtype), _type(dtype, shape))
        for side in (left, right)
        for array, dtype in zip(side, dtypes, strict=True)
    ]
    result = function(*tensors)
    items = (result,) if isinstance(result, tl.tensor) else tuple(result)
    if [item.dtype for item in items] != dtypes:
        raise TypeError(f"a combine function makes {[str(item.dtype) for item in items]} of {[str(dtype) for dtype in dtypes]}")
    return [item.handle.data for item in items]


def _every_second(array: Array, axis: int, start: int) -> Array:
    result: Array = array[(slice(None),) * axis + (slice(start, None, 2),)]
    return result


def _type(dtype: Any, shape: list[int]) -> Any:
    return tl.block_type(dtype, shape) if shape else dtype
