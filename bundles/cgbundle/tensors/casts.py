"""Casts that lose nothing: which there are, and one over memory of the CPU without a tensor library.

Safe is what NumPy calls so (`numpy.can_cast`), but for (u)int64 to float64 and complex128, where NumPy gives up digits.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES
from .tensor import Tensor, decode, from_bytes

_INTEGERS = {
    "bool": (1, False), "uint8": (8, False), "uint16": (16, False), "uint32": (32, False), "uint64": (64, False),
    "int8": (7, True), "int16": (15, True), "int32": (31, True), "int64": (63, True),
}  # fmt: skip
"""Binary digits of the largest number, and whether there are negative ones."""

_FLOATS = {
    "float8_e4m3fn": (4, 8, -9), "float8_e5m2": (3, 15, -16), "float16": (11, 15, -24), "bfloat16": (8, 127, -133),
    "float32": (24, 127, -149), "float64": (53, 1023, -1074),
}  # fmt: skip
"""Significant binary digits, exponent of the largest number, exponent of the smallest above zero."""

_PARTS = {"complex64": "float32", "complex128": "float64"}

_ARRAYS = {
    "float64": "d", "float32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "B",
}  # fmt: skip
"""The type codes of `array.array`."""

_ONE = {"float8_e4m3fn": 0x38, "float8_e5m2": 0x3C}


def is_safe(source: str, target: str) -> bool:
    """Whether every value of dtype `source` has an equal one of dtype `target`."""
    if source == target:
        return True
    if source not in DTYPES:
        return False  # of a library's own
    if target in _PARTS:
        return is_safe(_PARTS.get(source, source), _PARTS[target])
    if source in _PARTS:
        return False
    if target in _INTEGERS:
        digits, negative = _INTEGERS[target]
        return source in _INTEGERS and _INTEGERS[source][0] <= digits and (negative or not _INTEGERS[source][1])
    digits, largest, smallest = _FLOATS[target]
    if source in _INTEGERS:
        return _INTEGERS[source][0] <= min(digits, largest + 1)
    own = _FLOATS[source]
    return own[0] <= digits and own[1] <= largest and own[2] >= smallest


def cast(value: Tensor, dtype: str) -> Tensor:
    """A row-major copy with elements of `dtype`, to which the cast is safe.  Raises input-device for memory of a GPU."""
    if value.device is not None:
        hint = "cast it before the call, or pass torch or CuPy tensors"
        raise CallError("input-device", "a DLPack tensor on a GPU is not cast", hint)
    numbers = decode(value.dtype, value.tobytes())
    if dtype in _PARTS and value.dtype not in _PARTS:
        numbers = list(chain.from_iterable((number, 0) for number in numbers))
    return from_bytes(encoded(numbers, _PARTS.get(dtype, dtype)), dtype, value.shape)


def encoded(numbers: list[Any], dtype: str) -> bytes:
    """The little-endian bytes of numbers, each of which `dtype` has; complex ones as their two parts."""
    import array
    import struct

    if dtype in _ARRAYS:
        return array.array(_ARRAYS[dtype], numbers).tobytes()
    if dtype == "float16":
        return struct.pack(f"<{len(numbers)}e", *numbers)
    if dtype == "bfloat16":  # the upper halves of float32
        return array.array("H", array.array("H", encoded(numbers, "float32"))[1::2]).tobytes()
    return bytes([_ONE[dtype] if number else 0 for number in numbers])  # float8: no other dtype than bool fits
