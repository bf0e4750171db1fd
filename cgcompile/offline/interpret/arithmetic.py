"""The builder's methods that compute: types, constants, arithmetic, conversions, products.  See `builder`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from ...errors import BuildError
from . import values
from .sums import Sum, shape_of, summed, terms_of
from .values import Array, Handle

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
    """Divides integers, rounding towards zero as in C."""
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


def _xor(left: Array, right: Array) -> Array:
    return np.bitwise_xor(left, right) if left.dtype == np.bool_ else left + right


def _erf(item: Array) -> Array:
    result: Array = values.tensor_of(item).erf().numpy()
    return result


class Arithmetic:
    """`kernel`: the kernel's name in messages.  `widest`: the largest number of elements per instance so far."""

    def __init__(self) -> None:
        self.kernel = ""
        self.widest = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            raise self.refusal(f"tl operation {name.removeprefix('create_')!r}")
        raise AttributeError(name)

    def refusal(self, what: str) -> BuildError:
        """The error for an operation that the interpreter does not support."""
        return BuildError("function-not-interpretable", f"{self.kernel}: the interpreter does not support {what}")

    def value(self, data: Array, dtype: Any) -> Handle:
        """Returns a result of a dtype, rounded if its working type is wider."""
        if values.is_narrow(dtype):
            data = values.rounded(data, dtype)
        elif data.dtype != (working_type := values.working(dtype)):
            data = data.astype(working_type)
        return self.exact(data, dtype)

    def exact(self, data: Array, dtype: Any) -> Handle:
        """Returns a result that needs no rounding."""
        if data.size > self.widest * len(data):
            self.widest = data.size // len(data)
        return Handle(data, dtype)

    def sum(self, total: Sum) -> Sum:
        self.widest = max(self.widest, math.prod(total.shape[1:]))
        return total

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

    def create_add(self, left: Handle, right: Handle) -> Handle:
        """Returns a `Sum` of integers if its terms are smaller than the block."""
        if left.dtype.is_int() and left.dtype.primitive_bitwidth > 1:
            shape = np.broadcast_shapes(shape_of(left), shape_of(right))
            if (total := summed((*terms_of(left), *terms_of(right)), shape, left.dtype)) is not None:
                return self.sum(total)
        return self.value(_xor(left.data, right.data), left.dtype)

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
        """Sums products in float32 for every `precision` (float64 and 8-bit integers in float64)."""
        kind = np.float64 if left.dtype in (tl.float64, tl.int8, tl.uint8) else np.float32
        product = np.matmul(left.data.astype(kind, copy=False), right.data.astype(kind, copy=False))
        return self.value(product.astype(start.data.dtype, copy=False) + start.data, start.dtype)
