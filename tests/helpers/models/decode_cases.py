"""Cases of paged attention, for the kernel on a GPU and under Triton's interpreter; the reference is PyTorch."""

from __future__ import annotations

from typing import Any

import torch

CASES: dict[str, dict[str, Any]] = {
    "grouped heads": {"heads": 6, "key_heads": 2},
    "a head each, and a dim that is no power of two": {"dim": 24},
    "fewer dims than a product takes": {"dim": 8},
    "sinks, window and soft cap": {"heads": 4, "sinks": True, "window": 33, "softcap": 3.0},
    "chunks": {"heads": 4, "chunk": 33},
    "chunks that are no longer than a page": {"chunk": 7},
}


def case(
    *, heads: int = 2, key_heads: int = 2, dim: int = 16, window: int = 0, chunk: int = 0, softcap: float = 0.0,
    sinks: bool = False, lengths: tuple[int, ...] = (1, 0, 65, 130), device: str = "cpu", dtype: torch.dtype = torch.float32,
    page: int = 16,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns the arguments of `paged_decode` for lanes of these lengths. Pages are in random order. The position of the third
    query is 5 greater than that of the last token of its lane.
    """
    generator = torch.Generator().manual_seed(0)
    batch, blocks = len(lengths), -(-max(lengths) // page)
    pages = (torch.randperm(batch * blocks, generator=generator) + 1).view(batch, blocks)
    cache = [torch.randn(batch * blocks + 1, key_heads, page, dim, generator=generator) for _ in range(2)]
    query = torch.randn(batch, heads, dim, generator=generator)
    length = torch.tensor(lengths)
    place = (length - 1).clamp(min=0)
    place[2] += 5
    sunk = torch.randn(heads, generator=generator).to(device, dtype) if sinks else None
    tensors = [tensor.to(device, dtype) for tensor in (query, *cache)]
    return (*tensors, pages.to(device), place.to(device), length.to(device), sunk, dim**-0.5, window, chunk, softcap)


def prompt_case(*, seq: int = 40, **options: Any) -> tuple[Any, ...]:
    """Returns the arguments of `paged_prefill` and a mask of the valid new tokens, at most the last `seq` tokens of each lane."""
    query, keys, values, pages, _, length, sunk, scale, window, chunk, softcap = case(**options)
    count = torch.minimum(length, torch.tensor([seq, seq, seq - 3, seq], device=length.device))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(len(length), seq, *query.shape[1:], generator=generator).to(query.device, query.dtype)
    counts = torch.arange(seq, device=length.device) < count[:, None]
    return rows, keys, values, pages, length - count, count, sunk, scale, window, chunk, softcap, counts
