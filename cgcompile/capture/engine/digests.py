"""64 bits of every chunk of the GPU's memory, computed there: what changed is found without reading it back."""

from __future__ import annotations

import torch

from ...targets.cuda.tensors import device_bytes
from ..worker.weights import digest

CHUNK = 2 << 20
"""Bytes that are compared and put back together."""

AT_ONCE = 64
"""Chunks that are mixed at once: what that needs beside them is a few times their size."""


def digests(address: int, size: int) -> torch.Tensor:
    """The digest of every chunk of memory, the last of which may be shorter: (chunks,) int64.  `address` is a multiple of 8."""
    data = device_bytes(address, size)
    whole = size // CHUNK
    odd = torch.arange(CHUNK // 8, device=data.device) * 2 + 1
    parts = []
    for first in range(0, whole, AT_ONCE):
        words = data[CHUNK * first : CHUNK * min(whole, first + AT_ONCE)].view(torch.int64).view(-1, CHUNK // 8)
        parts.append(((words ^ (words >> 29)) * odd).sum(1))
    if size % CHUNK:
        parts.append(digest(data[CHUNK * whole :]).reshape(1))
    return torch.cat(parts)
