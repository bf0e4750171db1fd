"""64-bit digests of chunks of GPU memory, computed on the GPU, so that changes are found without a copy to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...targets.cuda.tensors import device_bytes
from ..worker.weights import mixed

CHUNK = 2 << 20
"""Bytes of a chunk, the unit in which memory is compared and restored."""

AT_ONCE = 64
"""Chunks that are digested at once: temporaries take a few times their size."""


def digests(address: int, size: int) -> torch.Tensor:
    """Returns the digest of every chunk of memory, (chunks,) int64; the digest of zeros is 0.  The last chunk may be shorter.
    `address` and `size` (bytes) are multiples of 8."""
    words = device_bytes(address, size).view(torch.int64)
    odd = torch.arange(CHUNK // 8, device=words.device) * 2 + 1
    full = size // CHUNK * CHUNK // 8
    parts = [(mixed(some.view(-1, CHUNK // 8)) * odd).sum(1) for some in words[:full].split(AT_ONCE * CHUNK // 8) if full]
    if size % CHUNK:
        parts.append((mixed(words[full:]) * odd[: len(words) - full]).sum().reshape(1))
    return torch.cat(parts)


def digests_of(parts: Sequence[torch.Tensor]) -> list[int]:
    """Returns the digests of small uint8 tensors, each a multiple of 8 bytes long.  It concatenates them to launch few kernels."""
    if not parts:
        return []
    words = torch.cat(list(parts)).view(torch.int64)
    sums = (mixed(words) * (torch.arange(len(words), device=words.device) * 2 + 1)).cumsum(0)
    ends = torch.tensor([part.numel() // 8 for part in parts], device=words.device).cumsum(0)
    totals = sums[ends - 1]
    return torch.cat([totals[:1], totals.diff()]).tolist()
