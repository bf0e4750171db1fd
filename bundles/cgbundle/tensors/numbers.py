"""Elements of tensors as Python numbers: decoded, encoded, cast without loss, printed. A cast is safe if NumPy says so
(`numpy.can_cast`), except (u)int64 to float64 and complex128, which lose digits. Pure."""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..format.schema import DTYPES

_INTEGERS = {
    "bool": (1, False), "uint8": (8, False), "uint16": (16, False), "uint32": (32, False), "uint64": (64, False),
    "int8": (7, True), "int16": (15, True), "int32": (31, True), "int64": (63, True),
}  # fmt: skip  # binary digits of the largest number, and whether negative ones exist
_FLOATS = {
    "float8_e4m3fn": (4, 8, -9), "float8_e5m2": (3, 15, -16), "float16": (11, 15, -24), "bfloat16": (8, 127, -133),
    "float32": (24, 127, -149), "float64": (53, 1023, -1074),
}  # fmt: skip
"""Significant binary digits, exponent of the largest number, exponent of the smallest above zero."""

PARTS = {"complex64": "float32", "complex128": "float64"}

_ARRAYS = {
    "float64": "d", "float32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "B", "complex64": "f", "complex128": "d",
}  # fmt: skip
"""Type codes of `array.array`; for complex numbers of their parts."""

_ONE = {"float8_e4m3fn": 0x38, "float8_e5m2": 0x3C}


def decode(dtype: str, data: bytes) -> list[Any]:
    """Python numbers from little-endian bytes; complex numbers as their two parts."""
    if dtype == "bfloat16":
        return array.array("f", array.array("I", [half << 16 for half in array.array("H", data)]).tobytes()).tolist()
    if dtype == "float8_e5m2":  # the upper half of a float16
        return decode("float16", bytes([half for byte in data for half in (0, byte)]))
    if dtype == "float8_e4m3fn":
        return [_e4m3fn(byte) for byte in data]
    if dtype == "float16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    return list(map(bool, data)) if dtype == "bool" else array.array(_ARRAYS[dtype], data).tolist()


def _e4m3fn(byte: int) -> float:
    """4 bits of exponent, 3 of fraction, no infinity."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -size if byte & 128 else size


def is_safe(source: str, target: str) -> bool:
    """Whether dtype `target` has every value of dtype `source`."""
    if source == target or source not in DTYPES:
        return source == target  # a dtype that only the caller's library has
    if target in PARTS or source in PARTS:
        return target in PARTS and is_safe(PARTS.get(source, source), PARTS[target])
    if target in _INTEGERS:
        digits, negative = _INTEGERS[target]
        return source in _INTEGERS and _INTEGERS[source][0] <= digits and (negative or not _INTEGERS[source][1])
    digits, largest, smallest = _FLOATS[target]
    if source in _INTEGERS:
        return _INTEGERS[source][0] <= min(digits, largest + 1)
    source_digits, source_largest, source_smallest = _FLOATS[source]
    return source_digits <= digits and source_largest <= largest and source_smallest >= smallest


def encoded(numbers: list[Any], dtype: str) -> bytes:
    """Little-endian bytes of numbers that `dtype` can represent; complex ones come as two parts."""
    if dtype in _ARRAYS:
        return array.array(_ARRAYS[dtype], numbers).tobytes()
    if dtype == "float16":
        return struct.pack(f"<{len(numbers)}e", *numbers)
    if dtype == "bfloat16":  # the upper halves of float32
        return array.array("H", array.array("H", encoded(numbers, "float32"))[1::2]).tobytes()
    return bytes([_ONE[dtype] if number else 0 for number in numbers])  # float8: only casts from bool are lossless


# --- printing -------------------------------------------------------------------------------------------------------

Number = bool | int | float | complex

FEW = 16  # up to this number of elements all are shown
EDGES = ((3, 3), (1, 1), (1, 0))
"""For more: how many are shown at both ends of the last axis, of the one before it, and of the others."""


def values(shape: Sequence[int], strides: Sequence[int], read: Callable[[int], Number]) -> str:
    """`[[1, 2, 3, ..., 8, 9, 0], ..., [1, 2, 3, ..., 8, 9, 0]]`, floats with six digits. `read` returns the element at an offset in
    elements."""
    edges = EDGES if prod([max(1, size) for size in shape]) > FEW else ()

    def along(axis: int, at: int) -> str:
        if axis == len(shape):
            number = read(at)
            return f"{number:.6g}" if isinstance(number, float | complex) else str(number)
        size = shape[axis]
        first, last = edges[min(len(shape) - 1 - axis, 2)] if edges else (size, 0)
        if size <= first + last:
            first, last = size, 0
        begin, end = [
            [along(axis + 1, at + index * strides[axis]) for index in part] for part in (range(first), range(size - last, size))
        ]
        return f"[{', '.join([*begin, *['...'] * (size > first + last), *end])}]"

    return along(0, 0)
