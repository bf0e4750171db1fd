"""Packs a launch's arguments into the parameter block that the driver copies to the device.  Pure.  Triton's launcher
(backends/nvidia/driver.c, 3.6 and 3.7) uses the same layout, but converts values that are refused here."""

from __future__ import annotations

import struct
from ctypes import c_float
from typing import NamedTuple

from ...errors import BuildError
from ..compile.kernels import CompiledKernel
from ..lowered import Launch, Pointer

INTEGERS = {
    "i1": (1, 0, 1), "u1": (1, 0, 1),
    **{f"i{8 * size}": (size, -(1 << (8 * size - 1)), (1 << (8 * size - 1)) - 1) for size in (1, 2, 4, 8)},
    **{f"u{8 * size}": (size, 0, (1 << (8 * size)) - 1) for size in (1, 2, 4, 8)},
}  # fmt: skip
"""Type -> (bytes, lowest value, highest value)."""

FLOATS = {"fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8}
"""Type -> bytes."""

POINTER = 8


class ParameterBlock(NamedTuple):
    """A parameter block.  The addresses in `data` are zero.  `places` lists them as (offset in the block, pointer)."""

    data: bytes
    places: tuple[tuple[int, Pointer], ...]


def pack_arguments(compiled: CompiledKernel, launch: Launch, where: str) -> ParameterBlock:
    """Packs a launch's arguments, up to the end of the last parameter; scratch pointers and padding are zero.  Raises
    parameter-mismatch if an argument is missing or too large for its type, or if its type does not have the parameter's size."""
    if len(launch.arguments) != len(compiled.params):
        text = f"{where} has {len(launch.arguments)} arguments for {len(compiled.params)} parameters"
        raise BuildError("parameter-mismatch", text)
    data = bytearray(max((offset + size for offset, size in compiled.layout), default=0))
    places: list[tuple[int, Pointer]] = []
    for (type_, name), (offset, size), value in zip(compiled.params, compiled.layout, launch.arguments, strict=False):
        what = f"{where}, parameter {name} ({type_})"
        if type_.startswith("*"):
            if not isinstance(value, Pointer):
                raise BuildError("parameter-mismatch", f"{what}: expected a buffer, got {value!r}")
            places.append((offset, value))
            packed = bytes(POINTER)
        elif isinstance(value, Pointer):
            raise BuildError("parameter-mismatch", f"{what}: expected a number, got buffer {value.buffer}")
        else:
            packed = scalar(type_, value, what)
        if len(packed) != size:
            raise BuildError("parameter-mismatch", f"{what}: {len(packed)} bytes, the image has {size} for it")
        data[offset : offset + size] = packed
    return ParameterBlock(data=bytes(data), places=tuple(places))


def scalar(type_: str, value: int | float, what: str) -> bytes:
    """Packs a number of a Triton type, little-endian.  fp32 is rounded to nearest; bf16 is truncated from fp32, as in triton's
    launcher.  Raises parameter-mismatch if the type is unknown or the value does not fit."""
    if type_ in INTEGERS:
        size, low, high = INTEGERS[type_]
        if not isinstance(value, int) or not low <= value <= high:
            raise BuildError("parameter-mismatch", f"{what}: {value!r} is no whole number from {low} to {high}")
        return int(value).to_bytes(size, "little", signed=low < 0)
    if type_ not in FLOATS:
        raise BuildError("parameter-mismatch", f"{what}: a parameter of an unknown type")
    number = float(value)
    if type_ == "fp64":
        return struct.pack("<d", number)
    if type_ == "fp16":
        try:
            return struct.pack("<e", number)
        except OverflowError:
            raise BuildError("parameter-mismatch", f"{what}: {value!r} is too large") from None
    single = bytes(c_float(number))  # rounds as C does; values too large become infinity
    return single[2:] if type_ == "bf16" else single
