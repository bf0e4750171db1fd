"""What is wrong with an input, once a call has failed: no call that works pays for these."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from ..errors import CallError, CgbundleError
from ..format.schema import DTYPES, TensorSpec
from ..format.size_expressions import text
from .library import Descriptor
from .numbers import is_safe

TYPES: dict[str, Any] = {
    "int64": ctypes.c_int64, "int32": ctypes.c_int32, "int16": ctypes.c_int16, "int8": ctypes.c_int8, "uint8": ctypes.c_uint8,
}  # fmt: skip
"""By dtype: those that an index may have."""

FAULTS = ("operation-refused", "driver-failed")
"""What a replay raises where compiled code finds an index out of range."""

HALF_DONE = ("operation-refused", "assertion-failed", "input-value")
"""What is raised in the middle of a call: what it wrote before stays, also where eager PyTorch checks first."""

WRITTEN = "; state that the call writes to may hold a part of it: reset() brings back what it held at first"


def explained(
    error: CgbundleError, specs: Sequence[TensorSpec], descriptors: Sequence[Descriptor], *, writes: bool
) -> CgbundleError:
    """The error of a replay, or where an input of the CPU has an element out of its range, an input-value that names the first.
    `writes`: the call changes state, and the hint says what has become of that."""
    explanation = _index_out_of_range(error, specs, descriptors)
    if writes and explanation.code in HALF_DONE:
        return type(explanation)(explanation.code, str(explanation), explanation.hint + WRITTEN)
    return explanation


def _index_out_of_range(error: CgbundleError, specs: Sequence[TensorSpec], descriptors: Sequence[Descriptor]) -> CgbundleError:
    if error.code in FAULTS:
        for spec, (address, shape, dtype, strides, device) in zip(specs, descriptors, strict=True):
            if spec.range and device is None and dtype in TYPES:
                for at, value in _outside(address, shape, dtype, strides, *spec.range):
                    low, high = spec.range
                    text = f"input {spec.name!r}: value {value} at {list(at)} is outside {low}..{high - 1}"
                    return CallError("input-value", text)
    return error


def _outside(
    address: int, shape: Sequence[int], dtype: str, strides: Sequence[int] | None, low: int, high: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(place, value) of elements that are not in [low, high), a row at a time; `strides` in elements, None for row-major."""
    if 0 in shape:
        return
    if strides is None:
        steps = [1]
        for size in reversed(shape[1:]):
            steps.insert(0, steps[0] * size)
        strides = steps[: len(shape)]
    *outer, size = shape or (1,)
    step = strides[-1] if shape else 1
    width = DTYPES[dtype]
    for at in product(*map(range, outer)):
        start = address + width * sum(index * stride for index, stride in zip(at, strides, strict=False))
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
    """The input-device of inputs on several devices, or on another one than the program's, `expected`."""
    for spec, (*_, device) in zip(inputs, descriptors, strict=True):
        if device is not None and device != expected:
            here = "the CPU" if expected is None else f"the CPU or CUDA device {expected}"
            return CallError("input-device", f"input {spec.name!r}: expected a tensor on {here}, got one on device {device}")
    other = next(index for index, descriptor in enumerate(descriptors) if descriptor[4] != descriptors[0][4])
    return CallError("input-device", f"input {inputs[other].name!r}: lies on another device than input {inputs[0].name!r}")


def wrong_dtype(spec: TensorSpec, dtype: str, *, written: bool) -> CallError:
    """The input-dtype of an input of another dtype than the signature's; `written`: the model writes to it."""
    hint = f"convert it to {spec.dtype} before the call"
    if written:
        hint += ": the model writes to it, so it is never cast"
    elif is_safe(dtype, spec.dtype):
        hint += ", or load the bundle with cast=True"
    else:
        hint += f": that may change its values, so cast=True would not (not every {dtype} has an equal {spec.dtype})"
    return CallError("input-dtype", f"input {spec.name!r}: expected dtype {spec.dtype}, got {dtype}", hint)


def unreadable(error: CallError, spec: TensorSpec, value: object) -> CallError:
    """The error of a library that cannot take `value` for an input, with what the signature says of that input."""
    hint = error.hint
    if isinstance(value, dict):
        hint = "every input is an argument of its own: program(**inputs)"
    elif isinstance(value, tuple | list) and any(hasattr(item, "shape") for item in value):
        hint = "every input is an argument of its own: program(*inputs)"
    elif isinstance(value, list | tuple | int | float | complex):
        numpys = not spec.dtype.startswith(("bfloat", "float8"))
        make = f"numpy.asarray(value, dtype={spec.dtype!r})" if numpys else f"torch.tensor(value, dtype=torch.{spec.dtype})"
        hint = f"make a tensor of it: {make}"
    shape = ", ".join(map(text, spec.shape))
    return CallError("input-kind", f"{error}; the bundle takes {spec.dtype} [{shape}]", hint)
