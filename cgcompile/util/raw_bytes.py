"""The bytes of a tensor on the CPU."""

from __future__ import annotations

import torch


def raw(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, uint8: a view where that is possible.  (`view(torch.uint8)` refuses a tensor of one
    element whose only stride is not 1, although it is contiguous.)"""
    flat = value.detach().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
