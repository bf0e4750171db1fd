"""Writes safetensors files one tensor at a time. The `safetensors` package's writer needs all tensors in memory and aligns to 8
bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import IO, Any

from .safetensors import ALIGNMENT, CODES, METADATA, PAIRS, nbytes
from .schema import DTYPES

Tensor = tuple[str, tuple[int, ...], Callable[[], Any]]
"""(dtype, shape, function that returns the bytes as a buffer)."""


def write(file: IO[bytes], tensors: Mapping[str, Tensor]) -> None:
    """Writes one tensor at a time. Equal tensors in any order give equal files."""
    for name in write_header(file, {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}):
        dtype, shape, contents = tensors[name]
        data = memoryview(contents())
        if data.nbytes != nbytes(dtype, shape):
            raise ValueError(f"tensor {name!r} gave {data.nbytes} bytes, expected {nbytes(dtype, shape)}")
        file.write(data)


def write_header(file: IO[bytes], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Writes the header and returns the offset of each tensor's data, in order. Data starts at a multiple of `ALIGNMENT`: the
    header is padded with spaces, and tensors whose size is a multiple come first."""

    def rank(name: str) -> tuple[bool, int, str]:
        dtype, shape = shapes[name]
        return (nbytes(dtype, shape) % ALIGNMENT != 0, -DTYPES[dtype], name)

    header: dict[str, Any] = {}
    used = {dtype for dtype, _ in shapes.values()}
    end = 0
    names = sorted(shapes, key=rank)
    for name in names:
        dtype, shape = shapes[name]
        begin, end = end, end + nbytes(dtype, shape)
        stored, more = (PAIRS[dtype], [2]) if dtype in PAIRS else (dtype, [])
        header[name] = {"dtype": CODES[stored], "shape": [*shape, *more], "data_offsets": [begin, end]}
    if pairs := {dtype: "\n".join([name for name in names if shapes[name][0] == dtype]) for dtype in PAIRS if dtype in used}:
        header[METADATA] = pairs
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in names}
