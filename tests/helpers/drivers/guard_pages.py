"""Memory between two inaccessible pages: an access one byte outside ends the process with SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap

from cgbundle.format.schema import DTYPES
from cgbundle.tensors.tensor import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
NOTHING = 0
"""PROT_NONE."""


class GuardedMemory:
    """`size` bytes at `address`, which end at the second guard page (`at_end`) or start after the first one."""

    def __init__(self, size: int, *, at_end: bool) -> None:
        page = mmap.PAGESIZE
        inner = max(1, -(-size // page)) * page
        self._map = mmap.mmap(-1, inner + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for forbidden in (begin, begin + page + inner):
            if _LIBC.mprotect(forbidden, page, NOTHING):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.address = begin + page + (inner - size if at_end else 0)


def guarded(data: bytes, dtype: str, shape: tuple[int, ...], *, at_end: bool) -> Tensor:
    """Returns a row-major tensor of these bytes between guard pages."""
    memory = GuardedMemory(len(data), at_end=at_end)
    assert memory.address % DTYPES[dtype] == 0
    ctypes.memmove(memory.address, data, len(data))
    return Tensor(memory.address, dtype, shape, None, memory)
