"""Decompositions for both recorders: operations of few rows, in terms of those that Inductor has a faster kernel for.

Private interfaces (torch 2.11, 2.13): `torch._inductor.inductor_prims.force_stride_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PRODUCTS = (torch.float16, torch.bfloat16, torch.float32)
"""Types that a matrix product has a template or a library for."""

SMALL = 1 << 20
"""Bytes of a matrix whose layout does not matter: it is read from the cache."""


def read_in_order(a: Tensor, b: Tensor) -> bool:
    """Whether a product of one row or one column is best a sum: over elements that lie side by side, or of a small matrix.
    It reads its matrix once, so that a sum is as fast as a tensor core, and is fused with what is before and behind it.

    A row by a weight of nn.Linear, bfloat16, by cuBLAS and as a sum on an H100 (torch 2.11), in microseconds: 768 to 2304 4.6 and
    1.5; 3072 to 768 7.4 and 2.3; 768 to 50257 32.7 and 24.9; 4096 to 4096 16.4 and 15.6; 4096 to 128256 370 and 336."""
    matrix, inner = (b, b.stride(-2)) if a.shape[-2] == 1 else (a, a.stride(-1))
    return inner == 1 or matrix.numel() * matrix.element_size() <= SMALL


def product(a: Tensor, b: Tensor) -> Tensor:
    """(..., m, k) by (..., k, n), both with the same leading axes, as a sum: of vectors, and of types outside PRODUCTS.  Sums of
    half precision are float32."""
    total = _summed(a, b)
    return NotImplemented if total is None else total.to(a.dtype)


def added_product(added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta * added + alpha * (a by b), with the sum of `product` where that takes a sum."""
    total = _summed(a, b)
    if total is None:
        return NotImplemented
    scaled = alpha * total
    return (scaled if beta == 0 else beta * added.to(total.dtype) + scaled).to(a.dtype)


def _summed(a: Tensor, b: Tensor) -> Tensor | None:
    """The sum, before it is rounded; None for what stays a product."""
    if a.dtype in PRODUCTS and min(a.shape[-2], b.shape[-1]) > 1 and a.shape[-1] > 0:
        return None
    wide = torch.float32 if a.dtype in PRODUCTS else a.dtype
    a, b = _computed_once(a, b)
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2, dtype=wide)


def _computed_once(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of a product of one row or one column, which gets memory of its own, as a library's operand does.  Inductor would
    compute it again for every element of the result: GELU's, of 3072 for 768, took 3.7 us of 6 on an H100 (torch 2.11)."""
    if a.dim() != 2:
        return a, b
    return (kept(a, a.stride()), b) if a.shape[0] == 1 else (a, kept(b, b.stride())) if b.shape[1] == 1 else (a, b)


def kept(x: Tensor, strides: Sequence[int]) -> Tensor:
    """`x`, which Inductor writes to memory unless it is used in the kernel that makes it: its operation for a layout."""
    import torch._inductor.inductor_prims

    strided: Tensor = torch.ops.prims.inductor_force_stride_order.default(x, strides)
    return strided


LONG, PART, ROWS = 8192, 1024, 64
"""An axis is reduced by parts of so many elements from a length on, where fewer rows than ROWS leave multiprocessors idle."""


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The place of the largest element along a long last axis, by parts of it: the first NaN, or the first of equals.  Inductor
    cuts sums and maxima so, but gives a row to one block here (torch 2.11 and 2.13).  50257 elements took 13.8 us on an H100."""
    length = x.shape[-1] if x.dim() else 1
    last = dim in (-1, x.dim() - 1) or (dim is None and x.dim() == 1)
    if not (x.dtype.is_floating_point and last and length >= LONG and 0 < x.numel() < ROWS * length):
        return NotImplemented
    count = -(-length // PART)
    step = length // count
    parts = x.unfold(-1, length - (count - 1) * step, step)  # as long as they overlap, nothing is padded, which took a kernel
    part = parts.amax(-1).argmax(-1, keepdim=True)
    indices = parts.argmax(-1).gather(-1, part) + step * part
    return indices if keepdim else indices.squeeze(-1)
