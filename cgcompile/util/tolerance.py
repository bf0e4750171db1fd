"""How far two computations of one model may differ, and how far they do.

The measure is that of `cgbundle.tensors.comparison`, which FORMAT.md states.  A bound is eight to ten times the rounding step of
the dtype for one operation, more for the depth of a model; of float8 it is the distance of two neighbours.  It holds for all
examples of this repository with a factor of ten to spare, and catches every real mistake tried.
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
    """How far a tensor is from what was expected: `error` as `comparison.difference` has it; `text` says what differs, or is ""."""

    error: float
    text: str


def tolerance(dtype: torch.dtype) -> float:
    """The largest allowed error of a result in `dtype`: 0 for integers and booleans."""
    return _BOUNDS.get(dtype, 0.0)


def is_float(dtype: torch.dtype) -> bool:
    """Whether results in `dtype` are rounded."""
    return dtype.is_floating_point or dtype.is_complex


def compare(expected: torch.Tensor, got: torch.Tensor) -> Difference:
    """What `cgbundle.tensors.comparison` says, of tensors on one device; infinite where shapes or dtypes differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return Difference(error=inf, text=f"{got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}")
    if not expected.numel() or (expected.device == got.device and same_bits(expected, got)):
        return Difference(error=0.0, text="")
    shape = expected.shape
    want, have = _parts(expected), _parts(got)
    wrong = want != have
    if is_float(expected.dtype):
        wrong &= ~(want.isnan() & have.isnan())
    places = positions(wrong)  # from here on what differs alone: state may be most of a GPU's memory, and is hardly ever elsewhere
    count = len(places)
    if not count:
        return Difference(error=0.0, text="")
    if not is_float(expected.dtype):
        return Difference(error=count / want.numel(), text=_text(want, have, count, int(places[0]), shape, "first"))
    distance = (have[places].double() - want[places].double()).abs().nan_to_num(nan=inf, posinf=inf)
    furthest = int(distance.argmax())
    largest = float(torch.where(want.isfinite(), want.abs(), 0).max())
    text = _text(want, have, count, int(places[furthest]), shape, "furthest off")
    return Difference(error=float(distance[furthest]) / (largest or 1.0), text=text)


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a row as they are, complex numbers as two; floats of one byte, which torch does not compare, as float32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg()).reshape(-1)
    flat = tensor.reshape(-1)
    if is_float(tensor.dtype) and tensor.element_size() == 1:
        return flat.to(torch.float32)
    return flat.view(torch.int64) if tensor.dtype is torch.uint64 else flat  # torch compares no uint64


def _text(want: torch.Tensor, have: torch.Tensor, count: int, place: int, shape: torch.Size, which: str) -> str:
    """As `comparison.describe` spells it."""
    if not count:
        return ""
    parts = want.numel() // max(1, shape.numel())
    index, axes = place // parts, []
    for size in reversed(shape):
        index, at = divmod(index, size)
        axes.append(at)
    where = f" at {axes[::-1]}" if shape else ""
    got, expected = [f"{float(flat[place]):.6g}" if is_float(flat.dtype) else str(flat[place].item()) for flat in (have, want)]
    return f"{count} of {want.numel()} {'parts' if parts == 2 else 'values'} differ, {which}{where}: {got}, expected {expected}"
