"""Represents a kernel's tensors as NumPy arrays, and converts between dtypes, with torch where NumPy lacks them. bfloat16 and 8-bit
floats are computed as float32 (the "working" type) and rounded after every operation.  In memory they have the GPU's bits (the
"stored" type).  torch is imported only when needed, because the import takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

_WORKING: dict[str, Any] = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "bf16": np.float32, "fp8e4nv": np.float32, "fp8e5": np.float32,
}  # fmt: skip
"""Working types by the names of Triton's scalar types."""

_NARROW: dict[str, tuple[str, Any, float]] = {
    "bf16": ("bfloat16", np.uint16, np.inf),
    "fp8e4nv": ("float8_e4m3fn", np.uint8, 448.0),
    "fp8e5": ("float8_e5m2", np.uint8, 57344.0),
}
"""Floats computed as float32: the name of torch's dtype, the stored type, and the largest value if a conversion saturates (PTX
cvt.satfinite)."""


class Handle:
    """The data of a `tl.tensor`.  Axes of `data`: the instances of the batch (1 if equal for all), then the axes of the block; a
    scalar has no block.  `dtype`: Triton's scalar type; addresses are int64.  `sums.Sum` computes its data on demand."""

    __slots__ = ("_data", "dtype")

    def __init__(self, data: Any, dtype: Any) -> None:
        self._data = data
        self.dtype = dtype

    @property
    def data(self) -> Array:
        elements: Array = self._data
        return elements

    def set_attr(self, name: str, values: Any) -> None:
        """Ignores the kernel's hints to the compiler (divisibility, contiguity), which change no value."""


def working(dtype: Any) -> Any:
    """The working type of a Triton scalar type.  Raises TypeError for unsupported types."""
    if dtype.is_ptr():
        return np.dtype(np.int64)
    if dtype.name not in _WORKING:
        raise TypeError(f"tl.{dtype} has no counterpart in NumPy")
    return np.dtype(_WORKING[dtype.name])


def stored(dtype: Any) -> Any:
    """The stored type of a Triton scalar type."""
    return np.dtype(_NARROW[dtype.name][1]) if dtype.name in _NARROW else working(dtype)


def is_narrow(dtype: Any) -> bool:
    """Whether values are represented as float32 and rounded."""
    return dtype.name in _NARROW


def to_stored(data: Array, dtype: Any) -> Array:
    """Converts to the stored type, which must represent the values exactly."""
    if dtype.name not in _NARROW:
        return data
    if dtype.name == "bf16":
        return (data.view(np.uint32) >> 16).astype(np.uint16)
    import torch

    return tensor_of(data).to(_torch_dtype(dtype)).view(torch.uint8).numpy()


def to_working(data: Array, dtype: Any) -> Array:
    """Converts stored values to the working type."""
    if dtype.name not in _NARROW:
        return data
    if dtype.name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return tensor_of(data).view(_torch_dtype(dtype)).float().numpy()


def rounded(data: Array, dtype: Any) -> Array:
    """Rounds float32 values to the nearest value of a type in `_NARROW`; 8-bit floats saturate."""
    largest = _NARROW[dtype.name][2]
    data = data.astype(np.float32, copy=False)
    if dtype.name == "bf16":  # ties to even; torch takes several times as long
        bits: Array = data.view(np.uint32)
        result = ((bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000).view(np.float32)
        nan_mask = data != data
        return np.where(nan_mask, np.float32(np.nan), result) if nan_mask.any() else result
    return tensor_of(np.clip(data, -largest, largest)).to(_torch_dtype(dtype)).float().numpy()


def convert(data: Array, source: Any, target: Any) -> Array:
    """Converts values to another scalar type.  Rounds to nearest, or towards zero if the target is an integer type."""
    if target.name in _NARROW:
        return rounded(data, target)
    return data.astype(working(target))


def bits_as(data: Array, source: Any, target: Any) -> Array:
    """Reinterprets the bits as another scalar type of the same size."""
    bits: Array = to_stored(data, source)
    if stored(target) == np.bool_:
        return bits != 0
    if bits.dtype == np.bool_:
        bits = bits.view(np.uint8)
    return to_working(bits.view(stored(target)), target)


def tensor_of(data: Array) -> torch.Tensor:
    """A torch tensor with an array's values.  It may share the memory, so do not write to it."""
    import torch

    return torch.from_numpy(data if data.flags.writeable else data.copy())


def _torch_dtype(dtype: Any) -> torch.dtype:
    import torch

    narrow_dtype: torch.dtype = getattr(torch, _NARROW[dtype.name][0])
    return narrow_dtype
