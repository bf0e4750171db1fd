"""Explains failed calls. Successful calls do not import this."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from ..errors import CallError, CgbundleError
from ..format.schema import DTYPES, TensorSpec
from ..format.shapes import dense, text
from .library import Descriptor
from .numbers import is_safe

TYPES: dict[str, Any] = {
    "int64": ctypes.c_int64, "int32": ctypes.c_int32, "int16": ctypes.c_int16, "int8": ctypes.c_int8, "uint8": ctypes.c_uint8,
}  # fmt: skip  # dtypes of indices
FAULTS = ("operation-refused", "driver-failed")  # errors of a replay if compiled code finds an index out of range
HALF_DONE = ("operation-refused", "assertion-failed", "input-value")
"""Errors in the middle of a call. Its earlier writes stay, also where eager PyTorch checks first."""

WRITTEN = "; state that the call writes to may hold a part of it: reset() brings back what it held at first"


def explained(
    error: CgbundleError, specs: Sequence[TensorSpec], descriptors: Sequence[Descriptor], *, writes: bool
) -> CgbundleError:
    """`error` of a replay, or an input-value that names the first index out of range in an input on the CPU. `writes`: the call
    changes state, which the hint mentions."""
    for spec, (address, shape, dtype, strides, device) in zip(specs, descriptors, strict=True):
        if error.code in FAULTS and spec.range and device is None and dtype in TYPES:
            low, high = spec.range
            if first := next(_outside(address, shape, dtype, strides, low, high), None):
                text = f"input {spec.name!r}: value {first[1]} at {list(first[0])} is outside {low}..{high - 1}"
                error = CallError("input-value", text)
    if writes and error.code in HALF_DONE:
        return type(error)(error.code, str(error), error.hint + WRITTEN)
    return error


def _outside(
    address: int, shape: Sequence[int], dtype: str, strides: Sequence[int] | None, low: int, high: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(place, value) of elements outside [low, high); `strides` in elements, None for row-major."""
    if 0 in shape:
        return
    *outer, size = shape or (1,)
    steps = dense(shape) if strides is None else strides
    step = steps[-1] if shape else 1
    width = DTYPES[dtype]
    for at in product(*map(range, outer)):
        start = address + width * sum(index * stride for index, stride in zip(at, steps, strict=False))
        count = (size - 1) * abs(step) + 1
        if step < 0:
            start -= width * (count - 1)
        row = (TYPES[dtype] * count).from_address(start)
        values = row[::step] if step else row[:] * size
        if min(values) < low or max(values) >= high:
            for index, value in enumerate(values):
                if not low <= value < high:
                    yield ((*at, index) if shape else ()), value


def wrong_device(inputs: Sequence[TensorSpec], descriptors: Sequence[Descriptor], expected: int | None) -> CallError:
    """The input-device error for inputs on several devices, or on another one than the program's."""
    for spec, (*_, device) in zip(inputs, descriptors, strict=True):
        if device is not None and device != expected:
            here = "the CPU" if expected is None else f"the CPU or CUDA device {expected}"
            return CallError("input-device", f"input {spec.name!r}: expected a tensor on {here}, got one on device {device}")
    other = next(index for index, descriptor in enumerate(descriptors) if descriptor[4] != descriptors[0][4])
    return CallError("input-device", f"input {inputs[other].name!r}: lies on another device than input {inputs[0].name!r}")


def wrong_dtype(spec: TensorSpec, dtype: str, *, written: bool) -> CallError:
    """The input-dtype error for an input; `written`: the model writes to it."""
    hint = f"convert it to {spec.dtype} before the call"
    if written:
        hint += ": the model writes to it, so it is never cast"
    elif is_safe(dtype, spec.dtype):
        hint += ", or load the bundle with cast=True"
    else:
        hint += f": that may change its values, so cast=True would not (not every {dtype} has an equal {spec.dtype})"
    return CallError("input-dtype", f"input {spec.name!r}: expected dtype {spec.dtype}, got {dtype}", hint)


def unreadable(error: CallError, spec: TensorSpec, value: object, library: str) -> CallError:
    """Adds the signature and a hint to the error of an input that is not a tensor.  `library`: that of the first input."""
    hint = error.hint
    if isinstance(value, dict):
        hint = "every input is an argument of its own: program(**inputs)"
    elif isinstance(value, tuple | list) and any(hasattr(item, "shape") for item in value):
        hint = "every input is an argument of its own: program(*inputs)"
    elif isinstance(value, list | tuple | int | float | complex):
        numpys = library != "torch" and not spec.dtype.startswith(("bfloat", "float8"))
        make = f"numpy.asarray(value, dtype={spec.dtype!r})" if numpys else f"torch.tensor(value, dtype=torch.{spec.dtype})"
        hint = f"make a tensor of it: {make}"
    shape = ", ".join(map(text, spec.shape))
    return CallError("input-kind", f"{error}; the bundle takes {spec.dtype} [{shape}]", hint)
