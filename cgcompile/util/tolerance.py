"""Compares results of one model, and defines how much they may differ.

FORMAT.md defines the error of a result, and `cgbundle.tensors.comparison` implements it.  A bound is at least five times
`torch.finfo(dtype).eps`.  For float8 it is about `eps`, the relative distance of two neighboring values.  All examples of this
repository stay ten times below it, and it detected every deliberate error that was tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from .raw_bytes import positions, same_bits

_BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-10,
    torch.float8_e4m3fn: 0.13,
    torch.float8_e5m2: 0.26,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """`error` is that of `comparison.difference`.  `text` says which values differ, or is ""."""

    error: float
    text: str


def tolerance(dtype: torch.dtype) -> float:
    """Returns the largest allowed error of a result in `dtype`: 0 for integers and booleans."""
    return _BOUNDS.get(dtype, 0.0)


def is_float(dtype: torch.dtype) -> bool:
    """Returns whether results in `dtype` are rounded."""
    return dtype.is_floating_point or dtype.is_complex


def compare(expected: torch.Tensor, got: torch.Tensor) -> Difference:
    """Returns the difference that `cgbundle.tensors.comparison` defines, for tensors on one device.  It is infinite if shapes or
    dtypes differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return Difference(error=inf, text=f"{got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}")
    if not expected.numel() or (expected.device == got.device and same_bits(expected, got)):
        return Difference(error=0.0, text="")
    shape = expected.shape
    ref, val = _parts(expected), _parts(got)
    differs = ref != val
    if is_float(expected.dtype):
        differs &= ~(ref.isnan() & val.isnan())
    indices = positions(differs)  # continue with differing elements only, because state may be large
    count = len(indices)
    if not count:
        return Difference(error=0.0, text="")
    if not is_float(expected.dtype):
        return Difference(error=count / ref.numel(), text=_text(ref, val, count, int(indices[0]), shape, "first"))
    distance = (val[indices].double() - ref[indices].double()).abs().nan_to_num(nan=inf, posinf=inf)
    furthest = int(distance.argmax())
    largest = float(torch.where(ref.isfinite(), ref.abs(), 0).max())
    text = _text(ref, val, count, int(indices[furthest]), shape, "furthest off")
    return Difference(error=float(distance[furthest]) / (largest or 1.0), text=text)


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """Returns flat elements: a complex number as two floats, and float8 as float32, because torch does not compare float8."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg()).reshape(-1)
    flat = tensor.reshape(-1)
    if is_float(tensor.dtype) and tensor.element_size() == 1:
        return flat.to(torch.float32)
    return flat.view(torch.int64) if tensor.dtype is torch.uint64 else flat  # torch does not compare uint64


def _text(want: torch.Tensor, have: torch.Tensor, count: int, place: int, shape: torch.Size, which: str) -> str:
    """Describes the difference in the wording of `comparison.describe`."""
    if not count:
        return ""
    parts = want.numel() // max(1, shape.numel())
    index, axes = place // parts, []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        axes.append(coordinate)
    where = f" at {axes[::-1]}" if shape else ""
    got, expected = [f"{float(flat[place]):.6g}" if is_float(flat.dtype) else str(flat[place].item()) for flat in (have, want)]
    return f"{count} of {want.numel()} {'parts' if parts == 2 else 'values'} differ, {which}{where}: {got}, expected {expected}"
