"""What answers Triton's front end: values in, values out, for all instances of a batch at once.

Methods carry the names of `triton._C.libtriton.ir.builder`, which the front end calls; a method that is missing here is refused by
name.  Public Triton interfaces only, but the set of methods and their arguments is Triton's own: 3.6 and 3.7.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl

from cgcompile.trace.errors import KernelAsserted, NoStandIn
from cgcompile.trace.lockstep import values
from cgcompile.trace.lockstep.blockpointers import BlockPointer
from cgcompile.trace.lockstep.memory import Memory
from cgcompile.trace.lockstep.values import Array, Handle

Method = Callable[..., Any]


def _binary(operation: Callable[[Array, Array], Array]) -> Method:
    return lambda self, left, right: self.value(operation(left.data, right.data), left.dtype)


def _compare(operation: Callable[[Array, Array], Array]) -> Method:
    return lambda self, left, right: self.value(operation(left.data, right.data), tl.int1)


def _unary(operation: Callable[[Array], Array]) -> Method:
    return lambda self, item: self.value(operation(item.data), item.dtype)


def _type(dtype: Any) -> Method:
    return lambda self: dtype


def _constant(dtype: Any) -> Method:
    return lambda self, number: Handle(np.array([number]).astype(values.working(dtype)), dtype)


def _cast(self: Any, item: Handle, target: Any, *signed: bool) -> Handle:
    return Handle(values.convert(item.data, item.dtype, target.scalar), target.scalar)


def _divide(left: Array, right: Array) -> Array:
    """Integers towards zero, as C divides them."""
    return (left - np.fmod(left, right)) // right


def _logical_right(left: Array, right: Array) -> Array:
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    return (left.view(unsigned) >> right.view(unsigned)).view(left.dtype)


def _high_product(left: Array, right: Array) -> Array:
    """The upper half of the product of unsigned integers."""
    half = left.dtype.itemsize * 4
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    low = unsigned.type((1 << half) - 1)
    a, b, c, d = left.view(unsigned) >> half, left.view(unsigned) & low, right.view(unsigned) >> half, right.view(unsigned) & low
    middle = a * d + (b * d >> half)
    result: Array = (a * c + (middle >> half) + ((middle & low) + b * c >> half)).view(left.dtype)
    return result


def _unordered(ordered: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A float comparison that also holds when a side is NaN, by the one that must not hold."""
    return lambda left, right: np.logical_not(ordered(left, right))


def _xor(left: Array, right: Array) -> Array:
    return np.bitwise_xor(left, right) if left.dtype == np.bool_ else left + right


def _erf(item: Array) -> Array:
    result: Array = torch.erf(values.tensor_of(item)).numpy()
    return result


class Builder:
    """`instances`: the program ids of the batch, an int32 array for each axis; `grid` the whole launch's; `options` what the
    front end asks a backend for.  `widest` is the largest number of elements per instance that a value had."""

    codegen_fns: dict[str, Any]

    def __init__(self, memory: Memory, options: Any) -> None:
        self.memory = memory
        self.options = options
        self.codegen_fns = {"min_dot_size": lambda left, right: (1, 1, 1)}
        self.kernel = ""
        self.grid = (1, 1, 1)
        self.instances = (np.zeros(1, np.int32),) * 3
        self.widest = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            raise self.refusal(f"tl operation {name.removeprefix('create_')!r}")
        raise AttributeError(name)

    def refusal(self, what: str) -> NoStandIn:
        """The error for something that cannot be done here."""
        return NoStandIn(f"{self.kernel}: the interpreter has no stand-in for {what}")

    def value(self, data: Array, dtype: Any) -> Handle:
        """A result as its type holds it: rounded when it is kept wider."""
        if values.is_narrow(dtype):
            data = values.rounded(data, dtype)
        elif data.dtype != (want := values.working(dtype)):
            data = data.astype(want)
        return self.exact(data, dtype)

    def exact(self, data: Array, dtype: Any) -> Handle:
        """A result that needs no rounding."""
        if data.size > self.widest * len(data):
            self.widest = data.size // len(data)
        return Handle(data, dtype)

    # types and constants

    get_void_ty = _type(tl.void)
    get_half_ty, get_bf16_ty, get_float_ty, get_double_ty = map(_type, (tl.float16, tl.bfloat16, tl.float32, tl.float64))
    get_int1_ty, get_int8_ty, get_int16_ty, get_int32_ty, get_int64_ty = map(
        _type, (tl.int1, tl.int8, tl.int16, tl.int32, tl.int64)
    )
    get_uint8_ty, get_uint16_ty, get_uint32_ty, get_uint64_ty = map(_type, (tl.uint8, tl.uint16, tl.uint32, tl.uint64))
    get_fp8e4nv_ty, get_fp8e5_ty = map(_type, (tl.float8e4nv, tl.float8e5))
    get_int1, get_int8, get_int16, get_int32, get_int64 = map(_constant, (tl.int1, tl.int8, tl.int16, tl.int32, tl.int64))
    get_uint8, get_uint16, get_uint32, get_uint64 = map(_constant, (tl.uint8, tl.uint16, tl.uint32, tl.uint64))
    get_fp16, get_fp32, get_fp64 = map(_constant, (tl.float16, tl.float32, tl.float64))

    def get_bf16(self, number: float) -> Handle:
        return self.value(np.array([number]), tl.bfloat16)

    def get_ptr_ty(self, element: Any, space: int) -> Any:
        return tl.pointer_type(element, space)

    def get_block_ty(self, dtype: Any, shape: list[int]) -> Any:
        return tl.block_type(dtype, shape)

    def get_null_value(self, dtype: Any) -> Handle:
        return Handle(np.zeros(1, values.working(dtype.scalar)), dtype.scalar)

    def get_all_ones_value(self, dtype: Any) -> Handle:
        return Handle(np.full(1, -1).astype(values.working(dtype.scalar)), dtype.scalar)

    # arithmetic

    create_fadd, create_fsub, create_fmul, create_fdiv = map(_binary, (np.add, np.subtract, np.multiply, np.divide))
    create_precise_divf = create_fdiv
    create_frem = create_srem = create_urem = _binary(np.fmod)
    create_sdiv = create_udiv = _binary(_divide)
    create_add = _binary(_xor)
    create_sub = _binary(lambda a, b: a ^ b if a.dtype == np.bool_ else a - b)
    create_mul = _binary(np.multiply)
    create_shl, create_lshr, create_ashr = _binary(np.left_shift), _binary(_logical_right), _binary(np.right_shift)
    create_and, create_or, create_xor = map(_binary, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    create_umulhi = _binary(_high_product)
    create_minsi = create_minui = create_minimumf = _binary(np.minimum)
    create_maxsi = create_maxui = create_maximumf = _binary(np.maximum)
    create_minnumf, create_maxnumf = _binary(np.fmin), _binary(np.fmax)

    create_icmpSLE = create_icmpULE = create_fcmpOLE = _compare(np.less_equal)
    create_icmpSLT = create_icmpULT = create_fcmpOLT = _compare(np.less)
    create_icmpSGE = create_icmpUGE = create_fcmpOGE = _compare(np.greater_equal)
    create_icmpSGT = create_icmpUGT = create_fcmpOGT = _compare(np.greater)
    create_icmpEQ = create_fcmpOEQ = _compare(np.equal)
    create_icmpNE = create_fcmpUNE = _compare(np.not_equal)
    create_fcmpULT, create_fcmpULE = _compare(_unordered(np.greater_equal)), _compare(_unordered(np.greater))
    create_fcmpUGT, create_fcmpUGE = _compare(_unordered(np.less_equal)), _compare(_unordered(np.less))

    create_exp, create_exp2, create_log, create_log2 = map(_unary, (np.exp, np.exp2, np.log, np.log2))
    create_sin, create_cos, create_floor, create_ceil = map(_unary, (np.sin, np.cos, np.floor, np.ceil))
    create_sqrt = create_precise_sqrt = _unary(np.sqrt)
    create_fabs = create_iabs = _unary(np.abs)
    create_rsqrt = _unary(lambda a: 1 / np.sqrt(a))
    create_erf = _unary(_erf)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = _cast
    create_fp_ext = create_fp_trunc = create_int_cast = _cast

    def create_fp_to_fp(self, item: Handle, target: Any, rounding: Any) -> Handle:
        if rounding is not None and rounding.name != "RTNE":
            raise self.refusal(f"a conversion to {target.scalar} that rounds by {rounding.name}")
        return _cast(self, item, target)

    def create_bitcast(self, item: Handle, target: Any) -> Handle:
        target = target.scalar
        if item.dtype.is_ptr() or target.is_ptr():
            return Handle(item.data.view(values.working(target)), target)
        return Handle(values.bits_as(item.data, item.dtype, target), target)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    def create_select(self, condition: Handle, left: Handle, right: Handle) -> Handle:
        return self.exact(np.where(condition.data, left.data, right.data), left.dtype)

    def create_clampf(self, item: Handle, low: Handle, high: Handle, propagate: Any) -> Handle:
        clamped = np.fmin(np.fmax(item.data, low.data), high.data)
        if propagate == tl.PropagateNan.ALL:
            clamped = np.where(np.isnan(item.data), item.data, clamped)
        return self.value(clamped, item.dtype)

    def create_fma(self, a: Handle, b: Handle, c: Handle) -> Handle:
        return self.value(a.data.astype(np.float64) * b.data + c.data, c.dtype)

    def create_dot(self, left: Handle, right: Handle, start: Handle, precision: Any, imprecise: int) -> Handle:
        """Products are summed in float32 (float64, int32 exactly) whatever the precision asked for: TF32 is not imitated."""
        kind = np.float64 if left.dtype in (tl.float64, tl.int8, tl.uint8) else np.float32
        product = np.matmul(left.data.astype(kind, copy=False), right.data.astype(kind, copy=False))
        return self.value(product.astype(start.data.dtype, copy=False) + start.data, start.dtype)

    # the launch

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(self.instances[axis], tl.int32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.grid[axis]], np.int32), tl.int32)

    def create_barrier(self) -> None:
        """Instances of a batch go in step, and threads do not exist here."""

    def create_print(self, *anything: Any) -> None:
        """What a kernel prints is not wanted."""

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise KernelAsserted(f"{self.kernel}: assertion failed: {message}")

    def create_assume(self, condition: Handle) -> None:
        if not condition.data.all():
            raise KernelAsserted(f"{self.kernel}: what the kernel tells the compiler to assume does not hold")

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
        """Arrays with the same number of instances."""
        count = max(len(array) for array in arrays)
        return [np.broadcast_to(array, (count, *array.shape[1:])) for array in arrays]

    # memory

    def create_addptr(self, pointer: Handle, offset: Handle) -> Handle:
        size = math.ceil(pointer.dtype.element_ty.primitive_bitwidth / 8)
        return self.value(pointer.data + size * offset.data.astype(np.int64), pointer.dtype)

    def create_load(self, pointer: Handle, cache: Any, eviction: Any, volatile: bool) -> Handle:
        return self.create_masked_load(pointer, None, None, cache, eviction, volatile)

    def create_masked_load(
        self, pointer: Handle, mask: Handle | None, other: Handle | None, cache: Any, eviction: Any, volatile: bool
    ) -> Handle:
        dtype = pointer.dtype.element_ty
        given = None if other is None else values.to_stored(other.data, dtype)
        data = self.memory.load(pointer.data, None if mask is None else mask.data, given, values.stored(dtype))
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
        shape = (len(self.instances[0]), *pointer.data.shape[1:])  # every instance does it, though all may do the same

        def stored(old: Array, new: tuple[Array, ...]) -> Array:
            wide = [values.to_working(array, dtype) for array in (old, *new)]
            return values.to_stored(self.value(combine(wide[0], wide[1:]), dtype).data, dtype)

        given = tuple(np.broadcast_to(values.to_stored(item.data, dtype), shape) for item in items)
        places, where = np.broadcast_to(pointer.data, shape), np.broadcast_to(mask.reshape(len(mask), *mask.shape[1:]), shape)
        old = self.memory.atomic(places, given, where, values.stored(dtype), stored)
        return self.exact(values.to_working(old, dtype), dtype)


def _swapped(elements: tuple[Handle, Handle | None], item: Handle) -> tuple[Handle, Handle, Handle | None]:
    return elements[0], item, elements[1]


_ATOMIC: dict[str, Callable[[Array, Array], Array]] = {
    "ADD": np.add, "FADD": np.add, "MIN": np.minimum, "UMIN": np.minimum, "MAX": np.maximum, "UMAX": np.maximum,
    "AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor, "XCHG": lambda old, new: new,
}  # fmt: skip
