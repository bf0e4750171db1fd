"""numpy.ndarray and cupy.ndarray, without importing NumPy or CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES
from ..format.shapes import span_of
from .library import Descriptor, Library, Wrapper, array_type, kind_of
from .tensor import Tensor


class Numpy(Library):
    """Arrays of NumPy; bfloat16 and float8 are those of `ml_dtypes`."""

    name = "numpy"

    def __init__(self, module: Any) -> None:
        self.module = module
        self.names: dict[Any, str] = {}

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        array = self.module.ndarray
        if type(value) is not array and not isinstance(value, array):
            if not isinstance(value, self.module.generic):
                raise CallError("input-kind", f"input {name!r}: expected a NumPy array like the first input, got {kind_of(value)}")
            value = self.module.asarray(value)
        elif type(value) is not array:
            if isinstance(value, self.module.ma.MaskedArray):
                raise CallError("input-kind", f"input {name!r}: expected an array without a mask, got {kind_of(value)}")
            value = self.module.asarray(value)  # a subclass may override attributes with wrong values
        if not value.dtype.isnative:
            raise CallError("input-kind", f"input {name!r}: expected native byte order, got dtype {value.dtype.str}")
        return value, self.describe(value)

    def describe(self, value: Any) -> Descriptor:
        dtype = value.dtype
        name = self.names.get(dtype)
        if name is None:
            name = self.names[dtype] = str(dtype.name)
        strides = None if value.flags.c_contiguous else self.strides(value)
        return value.__array_interface__["data"][0], value.shape, name, strides, None

    def strides(self, value: Any) -> Sequence[int]:
        size = value.dtype.itemsize
        # -1, which is never dense, for a stride that is no multiple of the element (a field of a structured array)
        return tuple([stride // size if stride % size == 0 else -1 for stride in value.strides])

    def byte_strides(self, value: Any) -> Sequence[int]:
        return tuple(value.strides)

    def ordered(self, value: Any, order: Sequence[int]) -> Any:
        back = sorted(range(len(order)), key=lambda axis: order[axis])
        return self.module.ascontiguousarray(value.transpose(order)).transpose(back)

    def wrapper(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Wrapper:
        size, array, kind = DTYPES[dtype], self.module.ndarray, self._dtype(dtype)
        memory, steps = array_type(span_of(dtype, shape, strides)), [stride * size for stride in strides]

        def alias(address: int, owner: object) -> Any:
            view = memory.from_address(address)
            view.owner = owner
            return array(shape, kind, view, 0, steps)

        return alias

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Any:
        return self.module.zeros(shape, self._dtype(dtype))

    def as_strided(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        size, at = DTYPES[dtype], value.__array_interface__["data"][0] + offset
        # as untyped elements: this interface has no names for the dtypes of `ml_dtypes`
        memory = _Borrowed()
        memory.owner, memory.__array_interface__ = value, {
            "version": 3, "data": (at, not value.flags.writeable), "typestr": f"|V{size}", "shape": tuple(shape),
            "strides": tuple([stride * size for stride in strides]),
        }  # fmt: skip
        return self.module.asarray(memory).view(self._dtype(dtype))

    def copy(self, value: Any) -> Any:
        return value.copy()

    def cast(self, value: Any, dtype: str) -> Any:
        return value.astype(self._dtype(dtype))

    def writable(self, value: Any, name: str) -> Any:
        if not (isinstance(value, self.module.ndarray) and value.flags.writeable):
            text = f"input {name!r}: the model writes to it, and the array is read-only"
            raise CallError("input-unwritable", text, "pass a copy of it")
        return value

    def _dtype(self, name: str) -> Any:
        if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            import ml_dtypes  # type: ignore[import-not-found, unused-ignore]

            return getattr(ml_dtypes, name)
        return getattr(self.module, name if name != "bool" else "bool_")


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


class _Borrowed:
    """NumPy's array interface over memory of `owner`, which the array keeps alive."""

    __array_interface__: dict[str, Any]
    owner: object
