"""Decompositions for both recorders: operations with few rows, as operations for which Inductor has a faster kernel.

Private interfaces (torch 2.11, 2.13): `torch._inductor.inductor_prims.force_stride_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PRODUCTS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes for which matrix products have a template or a library."""

SMALL = 1 << 20
"""Bytes of a matrix that fits the L2 cache, so that its layout does not matter."""


def read_in_order(a: Tensor, b: Tensor) -> bool:
    """Whether a product of one row or one column is faster as a sum: if the matrix is contiguous along the summed axis, or small.
    The matrix is read once, so a sum is as fast as a tensor core, and can be fused with operations around it.

    Microseconds of a row times a weight of nn.Linear, bfloat16, by cuBLAS and as a sum on an H100 (torch 2.11): 768 to 2304: 4.6,
    1.5; 3072 to 768: 7.4, 2.3; 768 to 50257: 32.7, 24.9; 4096 to 4096: 16.4, 15.6; 4096 to 128256: 370, 336."""
    matrix, inner = (b, b.stride(-2)) if a.shape[-2] == 1 else (a, a.stride(-1))
    return inner == 1 or matrix.numel() * matrix.element_size() <= SMALL


def product(a: Tensor, b: Tensor) -> Tensor:
    """Computes (..., m, k) times (..., k, n), with equal leading axes, as a sum: for vectors, and for dtypes outside PRODUCTS.
    Else returns NotImplemented.  Sums of half precision are float32."""
    total = _summed(a, b)
    return NotImplemented if total is None else total.to(a.dtype)


def added_product(added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Computes beta * added + alpha * (a times b), as a sum in the cases of `product`.  Else returns NotImplemented."""
    total = _summed(a, b)
    if total is None:
        return NotImplemented
    scaled = alpha * total
    return (scaled if beta == 0 else beta * added.to(total.dtype) + scaled).to(a.dtype)


def _summed(a: Tensor, b: Tensor) -> Tensor | None:
    """Returns the sum before it is rounded, or None if it must stay a product."""
    if a.dtype in PRODUCTS and min(a.shape[-2], b.shape[-1]) > 1 and a.shape[-1] > 0:
        return None
    wide = torch.float32 if a.dtype in PRODUCTS else a.dtype
    a, b = _computed_once(a, b)
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2, dtype=wide)


def _computed_once(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Makes Inductor store the row or the column of a product in memory.  Otherwise it is computed again for every element of the
    result: a GELU of 3072 elements, for 768 results, took 3.7 us of 6 on an H100 (torch 2.11)."""
    if a.dim() != 2:
        return a, b
    return (kept(a, a.stride()), b) if a.shape[0] == 1 else (a, kept(b, b.stride())) if b.shape[1] == 1 else (a, b)


def kept(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Forces the layout of `x`, so that Inductor stores it, unless it is used in the kernel that computes it."""
    import torch._inductor.inductor_prims

    strided: Tensor = torch.ops.prims.inductor_force_stride_order.default(x, strides)
    return strided


LONG, PART, ROWS = 8192, 1024, 64
"""With fewer than ROWS rows, an axis of at least LONG elements is reduced in parts of PART elements, to keep the GPU busy."""


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Computes argmax along a long last axis in parts: the position of the first NaN, or of the first of equal maxima.  Otherwise
    returns NotImplemented.  Inductor splits sums and maxima this way, but computes the argmax of a row in one block (torch 2.11 and
    2.13).  50257 elements took 13.8 us on an H100."""
    length = x.shape[-1] if x.dim() else 1
    last = dim in (-1, x.dim() - 1) or (dim is None and x.dim() == 1)
    if not (x.dtype.is_floating_point and last and length >= LONG and 0 < x.numel() < ROWS * length):
        return NotImplemented
    count = -(-length // PART)
    step = length // count
    parts = x.unfold(-1, length - (count - 1) * step, step)  # parts may overlap, because padding would need another kernel
    part = parts.amax(-1).argmax(-1, keepdim=True)
    indices = parts.argmax(-1).gather(-1, part) + step * part
    return indices if keepdim else indices.squeeze(-1)
