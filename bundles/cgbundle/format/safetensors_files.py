"""Maps safetensors files, and writes them one tensor at a time. The `safetensors` package's writer needs all tensors in memory and
aligns to 8 bytes."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from ..errors import BundleError
from .file_names import SELF_TEST
from .safetensors import ALIGNMENT, CODES, METADATA, PAIRS, nbytes, read_header
from .schema import DTYPES

POPULATE_READ = 22  # MADV_POPULATE_READ (include/uapi/asm-generic/mman-common.h), not in Python 3.11


class Mapped:
    """A safetensors file (path or open descriptor), mapped read-only; processes share its pages. `writable`: pages that this
    process writes become private copies. Addresses are valid until `close`. Raises weights-invalid."""

    def __init__(self, file: str | int, where: str, *, writable: bool = False) -> None:
        with open(file, "rb", closefd=not isinstance(file, int)) as opened:
            opened.seek(0)
            self.entries = read_header(opened, where)
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        self._base = _address(self._view)

    def address(self, name: str) -> int:
        return self._base + self.entries[name].begin

    def data(self, name: str) -> memoryview:
        entry = self.entries[name]
        return self._view[entry.begin : entry.end]

    def populate(self) -> None:
        """Loads all pages of the file into memory (Linux 5.14; older: starts readahead)."""
        libc, size = ctypes.CDLL(None), len(self._map)
        for advice in (POPULATE_READ, mmap.MADV_WILLNEED):
            if not libc.madvise(ctypes.c_void_p(self._base), ctypes.c_size_t(size), advice):
                return

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last view from `data`."""
        self._view.release()
        with suppress(BufferError):
            self._map.close()


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer (stable ABI since 3.11). ctypes itself has addresses of writable buffers only."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def _address(view: memoryview) -> int:
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def stored(self_test: Mapped, name: str) -> memoryview:
    """The bytes of a self-test tensor. Raises weights-invalid."""
    if name not in self_test.entries:
        raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r} is missing")
    return self_test.data(name)


# --- writing --------------------------------------------------------------------------------------------------------------


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
