"""The builder that Triton's front end calls.  Methods compute for all program instances of a batch at once.  They have the names
and arguments of `triton._C.libtriton.ir.builder`, Triton 3.6 and 3.7.  A missing method raises an error with its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from ...errors import ModelError
from . import values
from .arithmetic import Arithmetic
from .block_pointers import BlockPointer
from .memory import Memory
from .sums import Sum, compact, shape_of, summed, terms_of
from .values import Array, Handle


class Builder(Arithmetic):
    """`instances`: the program ids of the batch, an int32 array per axis.  `grid`: the grid of the launch.  `options`: the backend
    options of the front end.  `iterations`: the number of iterations of `while` loops so far."""

    def __init__(self, memory: Memory, options: Any) -> None:
        super().__init__()
        self.memory = memory
        self.options = options
        self.codegen_fns = {"min_dot_size": lambda left, right: (1, 1, 1)}
        self.grid = (1, 1, 1)
        self.iterations = 0
        self.instances: tuple[Array, Array, Array] = (np.zeros(1, np.int32),) * 3

    # the launch

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(self.instances[axis], tl.int32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.grid[axis]], np.int32), tl.int32)

    def create_barrier(self) -> None:
        """Does nothing: instances of a batch run together, without threads."""

    def create_print(self, *anything: Any) -> None:
        """Drops the output."""

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise ModelError("kernel-asserted", f"{self.kernel}: assertion failed: {message}")

    def create_assume(self, condition: Handle) -> None:
        if not condition.data.all():
            raise ModelError("kernel-asserted", f"{self.kernel}: an assumption that the kernel gives the compiler does not hold")

    # shapes

    def create_reshape(self, item: Handle, shape: list[int], reorder: bool) -> Handle:
        return Handle(item.data.reshape((len(item.data), *shape)), item.dtype)

    def create_trans(self, item: Handle, order: list[int]) -> Handle:
        return Handle(item.data.transpose((0, *(int(axis) + 1 for axis in order))), item.dtype)

    def create_expand_dims(self, item: Handle, axis: int) -> Handle:
        return Handle(np.expand_dims(item.data, axis + 1), item.dtype)

    def create_broadcast(self, item: Handle, shape: list[int]) -> Handle:
        return Handle(np.broadcast_to(item.data, (len(item.data), *shape)), item.dtype)

    def create_splat(self, target: Any, item: Handle) -> Handle:
        shape = target.get_block_shapes()
        column = item.data.reshape((len(item.data), *(1 for _ in shape)))
        return Handle(np.broadcast_to(column, (len(column), *shape)), item.dtype)

    def create_unsplat(self, item: Handle) -> Handle:
        return Handle(item.data.reshape(len(item.data), -1)[:, 0], item.dtype)

    def create_make_range(self, target: Any, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_cat(self, left: Handle, right: Handle) -> Handle:
        return Handle(np.concatenate(self.together(left.data, right.data), axis=1), left.dtype)

    def create_join(self, left: Handle, right: Handle) -> Handle:
        return Handle(np.stack(self.together(left.data, right.data), axis=-1), left.dtype)

    def create_split(self, item: Handle) -> tuple[Handle, Handle]:
        return Handle(item.data[..., 0], item.dtype), Handle(item.data[..., 1], item.dtype)

    def create_gather(self, item: Handle, indices: Handle, axis: int) -> Handle:
        data, at = self.together(item.data, indices.data)
        return Handle(np.take_along_axis(data, at.astype(np.int64), axis + 1), item.dtype)

    def create_histogram(self, item: Handle, bins: int, mask: Handle | None) -> Handle:
        counted = np.ones_like(item.data, bool) if mask is None else mask.data
        data, counted = self.together(item.data, counted)
        rows = [np.bincount(row[keep], minlength=bins)[:bins] for row, keep in zip(data, counted, strict=True)]
        return self.value(np.stack(rows), tl.int32)

    @staticmethod
    def together(*arrays: Array) -> list[Array]:
        """Broadcasts arrays to the same number of instances."""
        count = max(len(array) for array in arrays)
        return [np.broadcast_to(array, (count, *array.shape[1:])) for array in arrays]

    # memory

    def create_addptr(self, pointer: Handle, offset: Handle) -> Handle:
        size = math.ceil(pointer.dtype.element_ty.primitive_bitwidth / 8)
        byte_offset = offset.scaled(size) if isinstance(offset, Sum) else (compact(offset.data).astype(np.int64) * size,)
        if byte_offset is not None:
            shape = np.broadcast_shapes(shape_of(pointer), shape_of(offset))
            if (address := summed((*terms_of(pointer), *byte_offset), shape, pointer.dtype)) is not None:
                return self.sum(address)
        return self.value(pointer.data + size * offset.data.astype(np.int64), pointer.dtype)

    def create_load(self, pointer: Handle, cache: Any, eviction: Any, volatile: bool) -> Handle:
        return self.create_masked_load(pointer, None, None, cache, eviction, volatile)

    def create_masked_load(
        self, pointer: Handle, mask: Handle | None, other: Handle | None, cache: Any, eviction: Any, volatile: bool
    ) -> Handle:
        dtype = pointer.dtype.element_ty
        fallback = None if other is None else values.to_stored(other.data, dtype)
        data = None
        if isinstance(pointer, Sum) and (mask is None or compact(mask.data).all()):
            data = self.memory.load_lines(pointer, values.stored(dtype))
        if data is None:
            data = self.memory.load(pointer.data, None if mask is None else mask.data, fallback, values.stored(dtype))
        elif mask is not None:
            data = np.broadcast_to(data, np.broadcast_shapes(data.shape, mask.data.shape))
        return self.exact(values.to_working(data, dtype), dtype)

    def create_store(self, pointer: Handle, item: Handle, cache: Any, eviction: Any) -> None:
        self.create_masked_store(pointer, item, None, cache, eviction)

    def create_masked_store(self, pointer: Handle, item: Handle, mask: Handle | None, cache: Any, eviction: Any) -> None:
        data = values.to_stored(item.data, pointer.dtype.element_ty)
        self.memory.store(pointer.data, data, None if mask is None else mask.data)

    def create_make_block_ptr(
        self, base: Handle, shape: list[Handle], strides: list[Handle], offsets: list[Handle], block: list[int], order: list[int]
    ) -> BlockPointer:
        return BlockPointer(base, tuple(shape), tuple(strides), tuple(offsets), tuple(block))

    def create_advance(self, pointer: BlockPointer, offsets: list[Handle]) -> BlockPointer:
        return pointer.moved(offsets)

    def create_tensor_pointer_load(
        self, pointer: BlockPointer, checked: Any, padding: Any, cache: Any, eviction: Any, volatile: bool
    ) -> Handle:
        places, mask = pointer.elements(checked)
        return self.create_masked_load(places, mask, pointer.filling(padding), cache, eviction, volatile)

    def create_tensor_pointer_store(self, pointer: BlockPointer, item: Handle, checked: Any, cache: Any, eviction: Any) -> None:
        self.create_masked_store(*_swapped(pointer.elements(checked), item), cache, eviction)

    def create_make_tensor_descriptor(
        self, base: Handle, shape: list[Handle], strides: list[Handle], block: list[int], signed: bool, padding: Any
    ) -> BlockPointer:
        return BlockPointer(base, tuple(shape), tuple(strides), (), tuple(block), padding)

    def create_descriptor_load(self, descriptor: BlockPointer, offsets: list[Handle], cache: Any, eviction: Any) -> Handle:
        places, mask = descriptor.at(offsets).elements(range(len(offsets)))
        return self.create_masked_load(places, mask, descriptor.filling(descriptor.padding), cache, eviction, False)

    def create_descriptor_store(self, descriptor: BlockPointer, item: Handle, offsets: list[Handle]) -> None:
        self.create_masked_store(*_swapped(descriptor.at(offsets).elements(range(len(offsets))), item), None, None)

    def create_atomic_rmw(self, operation: Any, pointer: Handle, item: Handle, mask: Handle, order: Any, scope: Any) -> Handle:
        if operation.name not in _ATOMIC:
            raise self.refusal(f"atomic operation {operation.name}")
        return self._atomic(pointer, (item,), mask.data, lambda old, new: _ATOMIC[operation.name](old, new[0]))

    def create_atomic_cas(self, pointer: Handle, expected: Handle, item: Handle, order: Any, scope: Any) -> Handle:
        return self._atomic(pointer, (expected, item), np.ones(1, bool), lambda old, new: np.where(old == new[0], new[1], old))

    def _atomic(
        self, pointer: Handle, items: tuple[Handle, ...], mask: Array, combine: Callable[[Array, list[Array]], Array]
    ) -> Handle:
        dtype = items[0].dtype
        shape = (len(self.instances[0]), *pointer.data.shape[1:])  # each instance runs the operation, even if operands are equal

        def stored(old: Array, new: tuple[Array, ...]) -> Array:
            wide = [values.to_working(array, dtype) for array in (old, *new)]
            return values.to_stored(self.value(combine(wide[0], wide[1:]), dtype).data, dtype)

        operands = tuple(np.broadcast_to(values.to_stored(item.data, dtype), shape) for item in items)
        places, where = np.broadcast_to(pointer.data, shape), np.broadcast_to(mask, shape)
        old = self.memory.atomic(places, operands, where, values.stored(dtype), stored)
        return self.exact(values.to_working(old, dtype), dtype)


def _swapped(elements: tuple[Handle, Handle | None], item: Handle) -> tuple[Handle, Handle, Handle | None]:
    return elements[0], item, elements[1]


_ATOMIC: dict[str, Callable[[Array, Array], Array]] = {
    "ADD": np.add, "FADD": np.add, "MIN": np.minimum, "UMIN": np.minimum, "MAX": np.maximum, "UMAX": np.maximum,
    "AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor, "XCHG": lambda old, new: new,
}  # fmt: skip
