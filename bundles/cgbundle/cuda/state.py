"""Memory state on the GPU: filled when a session begins and at a reset, read and written by callers, in the order of a stream."""

from __future__ import annotations

import ctypes
from typing import Any

from ..session.initial_state import STATE, Initial
from . import memory
from .driver import check, cu
from .memory import Memories


def fill(memories: Memories, initial: Initial | None, stream: Any) -> None:
    """Puts the initial contents into a memory state of zeros."""
    for row in initial.rows if initial is not None else ():
        if row.source:
            memory.copy(memories.address(STATE, row.offset), row.source, row.size, stream, source_on_device=False)


def reset(memories: Memories, initial: Initial | None, stream: Any) -> None:
    """Brings the initial contents back, whatever memory state holds."""
    for row in initial.rows if initial is not None else ():
        if not row.source:
            memory.fill(memories.address(STATE, row.offset), row.size, 0, stream)
    fill(memories, initial, stream)


def fetch(address: int, size: int, stream: Any) -> bytes:
    """Bytes of the GPU's memory, when the work before this is done."""
    buffer = ctypes.create_string_buffer(max(1, size))
    memory.copy(ctypes.addressof(buffer), address, size, stream, target_on_device=False)
    check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
    return buffer.raw[:size]


def store(target: int, source: int, size: int, device: int | None, stream: Any) -> None:
    """Copies to the GPU, from memory of the CPU (None) before this returns: it may be pinned, and the caller's to change again."""
    memory.copy(target, source, size, stream, source_on_device=device is not None)
    if device is None:
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
