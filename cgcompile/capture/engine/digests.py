"""64 bits of every chunk of the GPU's memory, computed there: what changed is known without reading it back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...targets.cuda.tensors import device_bytes
from ..worker.weights import mixed

CHUNK = 2 << 20
"""Bytes that are compared and put back together."""

AT_ONCE = 64
"""Chunks that are mixed at once: what that needs beside them is a few times their size."""


def digests(address: int, size: int) -> torch.Tensor:
    """The digest of every chunk of memory, the last of which may be shorter: (chunks,) int64, 0 for zeros.  Address and size are
    multiples of 8."""
    words = device_bytes(address, size).view(torch.int64)
    odd = torch.arange(CHUNK // 8, device=words.device) * 2 + 1
    whole = size // CHUNK * CHUNK // 8
    parts = [(mixed(some.view(-1, CHUNK // 8)) * odd).sum(1) for some in words[:whole].split(AT_ONCE * CHUNK // 8) if whole]
    if size % CHUNK:
        parts.append((mixed(words[whole:]) * odd[: len(words) - whole]).sum().reshape(1))
    return torch.cat(parts)


def digests_of(parts: Sequence[torch.Tensor]) -> list[int]:
    """The digests of pieces of memory, uint8 and multiples of 8 bytes long, which are few in all: in a handful of kernels."""
    if not parts:
        return []
    words = torch.cat(list(parts)).view(torch.int64)
    sums = (mixed(words) * (torch.arange(len(words), device=words.device) * 2 + 1)).cumsum(0)
    ends = torch.tensor([part.numel() // 8 for part in parts], device=words.device).cumsum(0)
    totals = sums[ends - 1]
    return torch.cat([totals[:1], totals.diff()]).tolist()
