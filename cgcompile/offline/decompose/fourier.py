"""Computes Fourier transforms by matrix products of real and imaginary parts.

A short transform of n elements is a product with an n by n matrix.  A longer one, n = a * b, is a transform of a elements, twiddle
factors, and one of b elements (Cooley and Tukey, 1965). constant_folding.py folds the matrices, which it recognizes by their double
precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ModelError

aten = torch.ops.aten

WHOLE = 128
"""A transform of at most this many elements is always one product."""

LARGEST = 2048
"""The maximum length of a transform without two suitable factors.  Its matrices take 32 MB in float32."""

NONE, BY_ROOT, BY_SIZE = range(3)
"""The normalizations of transforms (aten/src/ATen/native/SpectralOpsUtils.h)."""


def to_complex(real: Tensor, imag: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> tuple[Tensor, Tensor]:
    """`aten._fft_c2c` along the axes `dim`.  Raises operator-without-kernel."""
    scale = _scale([real.shape[axis] for axis in dim], normalization)
    for axis in dim:
        parts = _transform(real.movedim(axis, -1), imag.movedim(axis, -1), forward)
        real, imag = [part.movedim(-1, axis) for part in parts]
    return _scaled(real, scale), _scaled(imag, scale)


def to_complex_halves(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> tuple[Tensor, Tensor]:
    """`aten._fft_r2c`.  With `onesided`, returns only the first n // 2 + 1 elements along the last axis of `dim`.  Raises
    operator-without-kernel."""
    scale = _scale([x.shape[axis] for axis in dim], normalization)
    last, length = dim[-1], x.shape[dim[-1]]
    count = length // 2 + 1 if onesided else length
    rows = x.movedim(last, -1)
    if _factors(length) is None:
        cosines, sines = _matrices(length, x)
        both = rows @ torch.cat([cosines[:, :count], -sines[:, :count]], -1)
        real, imag = both[..., :count], both[..., count:]
    else:
        real, imag = [part[..., :count] for part in _transform(rows, torch.zeros_like(rows), True)]
    halves = _scaled(real.movedim(-1, last), scale), _scaled(imag.movedim(-1, last), scale)
    return to_complex(*halves, dim[:-1], NONE, True) if len(dim) > 1 else halves


def to_real(real: Tensor, imag: Tensor, dim: Sequence[int], normalization: int, size: int) -> Tensor:
    """`aten._fft_c2r`, the inverse.  The input has the first size // 2 + 1 elements along the last axis of `dim`.  Raises
    operator-without-kernel."""
    last = dim[-1]
    scale = _scale([*[real.shape[axis] for axis in dim[:-1]], size], normalization)
    if len(dim) > 1:
        real, imag = to_complex(real, imag, dim[:-1], NONE, False)
    real, imag = real.movedim(last, -1), imag.movedim(last, -1)
    count = size // 2 + 1
    real, imag = real[..., :count], imag[..., :count]
    if _factors(size) is None:
        cosines, sines = _matrices(size, real)
        # an element counts twice if its conjugate is in the second half, which is missing
        weights = torch.full((count, 1), 2.0, dtype=torch.float64, device=real.device)
        place = torch.arange(count, device=real.device).unsqueeze(-1)
        weights = torch.where((place == 0) | (place * 2 == size), 1.0, weights)
        factors = [(part[:count].to(torch.float64) * weights).to(real.dtype) for part in (cosines, -sines)]
        signal = torch.cat([real, imag], -1) @ torch.cat(factors)
    else:
        second_half = slice(1, size - count + 1)
        all_real = torch.cat([real, real[..., second_half].flip(-1)], -1)
        imag = torch.cat([imag[..., :1] * 0, imag[..., 1:]], -1)  # imaginary parts of the first and middle element are ignored
        if size % 2 == 0:
            imag = torch.cat([imag[..., :-1], imag[..., -1:] * 0], -1)
        signal, _ = _transform(all_real, torch.cat([imag, -imag[..., second_half].flip(-1)], -1), False)
    return _scaled(signal.movedim(-1, last), scale)


def inverse_short_time(
    spectrum: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """`aten.istft` of complex numbers (..., bins, frames) -> (..., samples).  A graph cannot check that every sample is in a
    window; a sample in no window is 0 / 0.  The build's eager run checks it."""
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    if window is None:
        window = torch.ones(width, dtype=spectrum.dtype.to_real(), device=spectrum.device)
    before = (n_fft - width) // 2
    window = aten.constant_pad_nd(window, [before, n_fft - width - before])
    frames, norm = spectrum.transpose(-1, -2), "ortho" if normalized else "backward"
    if return_complex:
        segments = torch.fft.ifft(frames, n_fft, norm=norm)
    else:
        segments = torch.fft.irfft(frames[..., : n_fft // 2 + 1], n_fft, norm=norm)
    sums = overlapped(segments * window, hop)
    shares = overlapped((window * window).expand(segments.shape[-2:]), hop)
    begin = n_fft // 2 if center else 0
    end = sums.shape[-1] - (n_fft // 2 if center else 0) if length is None else begin + length
    signal = sums[..., begin:end] / shares[begin:end]
    return signal if length is None else aten.constant_pad_nd(signal, [0, length - signal.shape[-1]])


def overlapped(frames: Tensor, hop: int) -> Tensor:
    """(..., frames, n) -> (..., n + hop * (frames - 1)): the sum of all frames, each placed `hop` elements after the previous
    one."""
    count, n = frames.shape[-2:]
    parts = -(-n // hop)
    cut = aten.constant_pad_nd(frames, [0, parts * hop - n]).unflatten(-1, (parts, hop))  # (..., frames, parts, hop)
    rows = [aten.constant_pad_nd(cut[..., part, :], [0, 0, part, parts - 1 - part]) for part in range(parts)]
    return sum(rows[1:], rows[0]).flatten(-2)[..., : n + hop * (count - 1)]


def _transform(real: Tensor, imag: Tensor, forward: bool) -> tuple[Tensor, Tensor]:
    """Transforms the last axis, without normalization."""
    length = real.shape[-1]
    parts = _factors(length)
    if parts is None:
        cosines, sines = _matrices(length, real)
        sines = -sines if forward else sines
        matrix = torch.cat([torch.cat([cosines, sines], -1), torch.cat([-sines, cosines], -1)])
        both = torch.cat([real, imag], -1) @ matrix
        return both[..., :length], both[..., length:]
    # element b * j + i becomes k + a * l: a transform over j, twiddle factors, and a transform over i
    a, b = parts
    real, imag = [part.reshape(*part.shape[:-1], a, b).transpose(-1, -2) for part in (real, imag)]  # (..., i, j)
    real, imag = _transform(real, imag, forward)  # (..., i, k)
    turns = torch.arange(b, device=real.device).unsqueeze(-1) * torch.arange(a, device=real.device)
    cosines, sines = _cosines_and_sines(turns, length, real.dtype)
    sines = -sines if forward else sines
    real, imag = real * cosines - imag * sines, real * sines + imag * cosines
    real, imag = _transform(real.transpose(-1, -2), imag.transpose(-1, -2), forward)  # (..., k, l)
    return tuple(part.transpose(-1, -2).reshape(*part.shape[:-2], length) for part in (real, imag))


def _factors(length: int) -> tuple[int, int] | None:
    """Returns two factors of a length that is transformed in two steps, or None for one step.  Raises operator-without-kernel."""
    if length <= WHOLE:
        return None
    small = next(divisor for divisor in range(math.isqrt(length), 0, -1) if length % divisor == 0)
    if small >= 8:
        return length // small, small
    if length > LARGEST:
        what = f"a Fourier transform of {length} elements, a number without two factors from 8 on"
        raise ModelError("operator-without-kernel", what)
    return None


def _matrices(length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of 2 pi i j / length for all i and j, (length, length)."""
    places = torch.arange(length, device=like.device)
    return _cosines_and_sines(places.unsqueeze(-1) * places, length, like.dtype)


def _cosines_and_sines(turns: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = (turns % length).to(torch.float64) * (2 * math.pi / length)
    return torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)


def _scale(sizes: Sequence[int], normalization: int) -> float:
    return {NONE: 1.0, BY_ROOT: math.prod(sizes) ** -0.5, BY_SIZE: 1 / math.prod(sizes)}[normalization]


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale
