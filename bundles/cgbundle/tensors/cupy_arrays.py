"""cupy.ndarray, without importing CuPy: NumPy's interface over GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CallError
from .library import Descriptor, kind_of
from .numpy_arrays import Numpy
from .tensor import Tensor


class Cupy(Numpy):
    name = "cupy"

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        if not isinstance(value, self.module.ndarray):
            raise CallError("input-kind", f"input {name!r}: expected a CuPy array like the first input, got {kind_of(value)}")
        return value, self.describe(value)

    def describe(self, value: Any) -> Descriptor:
        dtype = value.dtype
        strides = None if value.flags.c_contiguous else self.strides(value)
        return value.data.ptr, value.shape, str(dtype.name), strides, value.device.id

    def wrap(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        return self.module.from_dlpack(Tensor(address, dtype, shape, strides, owner, device))

    def as_strided(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        return self.wrap(value.data.ptr + offset, dtype, shape, strides, value, value.device.id)

    def stream(self, device: int) -> int | None:
        return int(self.module.cuda.get_current_stream().ptr)

    def writable(self, value: Any, name: str) -> Any:
        return value
