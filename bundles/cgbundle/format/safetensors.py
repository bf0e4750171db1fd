"""Reads safetensors files without loading them: 8 bytes of header length, a JSON header, then the data. The readers of the
`safetensors` package need NumPy or torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import IO, Any

from ..errors import BundleError
from ..format import limits
from .limits import brief
from .records import dataclass, replace
from .schema import DTYPES

ALIGNMENT = 256  # bytes: CUDA's guarantee for an allocation, and four cache lines
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""The format's code of each dtype."""

PAIRS = {"complex128": "float64"}
"""Dtypes without a name in the format: stored with a last axis of real and imaginary part, and listed in `__metadata__`."""


METADATA = "__metadata__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A row-major tensor of the file; `begin` and `end` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: IO[bytes], where: str) -> dict[str, Entry]:
    """The entries of an open file, in the order of their data. Raises weights-invalid unless the tensors cover the rest of the file
    exactly and match their shapes."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or 8 + length > size:
        raise invalid(where, f"the header's length does not fit the file of {size} bytes")
    if length > limits.JSON_BYTES:
        raise invalid(where, f"a header of {length} bytes, more than the limit of {limits.JSON_BYTES}")
    try:
        plain = limits.parse(file.read(length))
    except ValueError as error:
        raise invalid(where, f"the header: {error}") from None
    if type(plain) is not dict:
        raise invalid(where, f"the header is no object but {type(plain).__name__}")
    dtypes = {code: name for name, code in CODES.items()}
    metadata = plain.pop(METADATA, {})
    entries = {name: _entry(name, item, dtypes, 8 + length, where) for name, item in plain.items()}
    named = metadata if type(metadata) is dict else {}
    pairs = [(name, dtype) for dtype in PAIRS if type(named.get(dtype)) is str for name in named[dtype].split("\n")]
    for name, dtype in pairs:
        if name not in entries or (entries[name].dtype, entries[name].shape[-1:]) != (PAIRS[dtype], (2,)):
            raise invalid(where, f"tensor {name!r} is no {dtype}: a {PAIRS[dtype]} whose last axis has 2")
        entries[name] = replace(entries[name], dtype=dtype, shape=entries[name].shape[:-1])
    ordered = dict(sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)))
    end = 8 + length
    for name, entry in ordered.items():
        if entry.begin != end:
            raise invalid(where, f"tensor {name!r} begins at byte {entry.begin}, expected {end}")
        if entry.end - entry.begin != nbytes(entry.dtype, entry.shape):
            raise invalid(where, f"tensor {name!r} has {entry.end - entry.begin} bytes, its shape {list(entry.shape)} needs others")
        end = entry.end
    if end != size:
        raise invalid(where, f"the file has {size} bytes, its header promises {end}")
    return ordered


def invalid(where: str, message: str) -> BundleError:
    return BundleError("weights-invalid", f"{where}: {message}")


def _entry(name: str, item: Any, dtypes: Mapping[str, str], start: int, where: str) -> Entry:
    if len(name) > limits.NAME or not name.isprintable():
        raise invalid(where, f"the name {name[:40]!r} of a tensor is not printable, or longer than {limits.NAME} characters")
    if type(item) is not dict or not item.keys() >= {"dtype", "shape", "data_offsets"}:
        raise invalid(where, f"tensor {name!r}: expected its dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if type(dtype) is not str or dtype not in dtypes:
        raise invalid(where, f"tensor {name!r}: unknown dtype {brief(dtype)}")
    if type(shape) is not list or len(shape) > limits.AXES or not all(map(_is_count, shape)):
        raise invalid(where, f"tensor {name!r}: its shape is no list of at most {limits.AXES} sizes of 64 bits")
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise invalid(where, f"tensor {name!r}: its data_offsets are not two numbers of bytes")
    return Entry(dtype=dtypes[dtype], shape=tuple(shape), begin=start + offsets[0], end=start + offsets[1])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < limits.INTEGER


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    return DTYPES[dtype] * prod(shape)
