"""Matrix products with a vector as sums, which Inductor fuses with what is before and behind them.  Such a product reads its matrix
once, so that a sum is as fast as a tensor core; and a library's call is a kernel or two more, which takes longer than a small one
runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PRODUCTS = (torch.float16, torch.bfloat16, torch.float32)
"""Types that a matrix product has a template or a library for."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """(..., m, k) by (..., k, n), both with the same leading axes, as a sum: of vectors, and of types outside PRODUCTS.  Sums of
    half precision are float32."""
    if a.dtype in PRODUCTS and min(a.shape[-2], b.shape[-1]) > 1 and a.shape[-1] > 0:
        return NotImplemented
    wide = torch.float32 if a.dtype in PRODUCTS else a.dtype
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2, dtype=wide).to(a.dtype)


def added_product(added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta * added + alpha * (a by b), with the sum of `product` where that takes a sum."""
    if a.dtype in PRODUCTS and min(a.shape[-2], b.shape[-1]) > 1 and a.shape[-1] > 0:
        return NotImplemented
    wide = torch.float32 if a.dtype in PRODUCTS else a.dtype
    scaled = alpha * (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2, dtype=wide)
    return (scaled if beta == 0 else beta * added.to(wide) + scaled).to(a.dtype)
