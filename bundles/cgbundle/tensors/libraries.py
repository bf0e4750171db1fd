"""Tensors of the caller's library, without importing it: NumPy, torch, or our own `Tensor` (which DLPack producers are read into).

A library is found by the type of the first input, among the modules that the caller has imported already.  All its operations
are the same few: `read` a tensor's place, `ordered` it in memory, make one `alias` over memory of ours, a look at a `part` of one,
`empty` one of its own; slicing and assignment are the library's `x[slices]` and `x[slices] = y`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES
from . import dlpack, tensor
from .interface import Aliaser, Library, Place, array_type, kind_of, span_bytes

LEGACY_STREAM = 1
"""CU_STREAM_LEGACY: the stream that DLPack producers are asked to make their data ready on."""


class Numpy:
    """numpy.ndarray.  bfloat16 and float8 arrays are those of the `ml_dtypes` package."""

    name = "numpy"

    def __init__(self, module: Any) -> None:
        self.module = module
        self.names: dict[Any, str] = {}

    def take(self, value: Any, name: str) -> tuple[Any, Place]:
        if type(value) is not self.module.ndarray and not isinstance(value, self.module.ndarray):
            if not isinstance(value, self.module.generic):
                raise CallError("input-kind", f"input {name!r}: expected a NumPy array like the first input, got {kind_of(value)}")
            value = self.module.asarray(value)
        elif type(value) is not self.module.ndarray and hasattr(value, "mask"):
            raise CallError("input-kind", f"input {name!r}: expected an array without a mask, got {kind_of(value)}")
        if not value.dtype.isnative:
            raise CallError("input-kind", f"input {name!r}: expected native byte order, got dtype {value.dtype.str}")
        return value, self.read(value)

    def read(self, value: Any) -> Place:
        dtype = value.dtype
        name = self.names.get(dtype)
        if name is None:
            name = self.names[dtype] = str(dtype.name)
        strides = None if value.flags.c_contiguous else self.strides(value)
        return value.__array_interface__["data"][0], value.shape, name, strides, None

    def strides(self, value: Any) -> Sequence[int]:
        size = value.dtype.itemsize
        # a stride that is no whole number of elements (a field of a structured array) never looks dense: -1
        return tuple([stride // size if stride % size == 0 else -1 for stride in value.strides])

    def steps(self, value: Any) -> Sequence[int]:
        found: tuple[int, ...] = value.strides
        return found

    def ordered(self, value: Any, order: Sequence[int]) -> Any:
        back = sorted(range(len(order)), key=lambda axis: order[axis])
        return self.module.ascontiguousarray(value.transpose(order)).transpose(back)

    def aliaser(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Aliaser:
        size, array, kind = DTYPES[dtype], self.module.ndarray, self._dtype(dtype)
        memory, steps = array_type(span_bytes(shape, strides, size)), [stride * size for stride in strides]

        def alias(address: int, owner: object) -> Any:
            made = memory.from_address(address)
            made.owner = owner
            return array(shape, kind, made, 0, steps)

        return alias

    def alias(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        return self.aliaser(dtype, shape, strides)(address, owner)

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Any:
        return self.module.zeros(shape, self._dtype(dtype))

    def part(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        size, at = DTYPES[dtype], value.__array_interface__["data"][0] + offset
        steps = tuple([stride * size for stride in strides])
        # as elements without a type: those of `ml_dtypes` have no name in this interface
        borrowed = _Borrowed(at, not value.flags.writeable, f"|V{size}", tuple(shape), steps, value)
        return self.module.asarray(borrowed).view(self._dtype(dtype))

    def stream(self, device: int) -> int | None:
        return None

    def copy(self, value: Any) -> Any:
        return value.copy()

    def writable(self, value: Any, name: str) -> Any:
        if not (isinstance(value, self.module.ndarray) and value.flags.writeable):
            raise CallError(
                "input-unwritable", f"input {name!r}: the model writes to it, and the array is read-only", "pass a copy of it"
            )
        return value

    def finish(self, value: Any, like: Any) -> Any:
        return value

    def _dtype(self, name: str) -> Any:
        if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            import ml_dtypes  # type: ignore[import-not-found, unused-ignore]

            return getattr(ml_dtypes, name)
        return getattr(self.module, name if name != "bool" else "bool_")


class _Borrowed:
    """NumPy's array interface over memory of `owner`, which the array keeps."""

    def __init__(
        self, address: int, read_only: bool, kind: str, shape: tuple[int, ...], steps: tuple[int, ...], owner: object
    ) -> None:
        place = (address, read_only)
        self.__array_interface__ = {"version": 3, "data": place, "typestr": kind, "shape": shape, "strides": steps}
        self.owner = owner


class Cupy(Numpy):
    """cupy.ndarray: NumPy's interface over GPU memory."""

    name = "cupy"

    def take(self, value: Any, name: str) -> tuple[Any, Place]:
        if not isinstance(value, self.module.ndarray):
            raise CallError("input-kind", f"input {name!r}: expected a CuPy array like the first input, got {kind_of(value)}")
        return value, self.read(value)

    def read(self, value: Any) -> Place:
        dtype = value.dtype
        strides = None if value.flags.c_contiguous else self.strides(value)
        return value.data.ptr, value.shape, str(dtype.name), strides, value.device.id

    def alias(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        return self.module.from_dlpack(tensor.Tensor(address, dtype, shape, strides, owner, device))

    def part(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        return self.alias(value.data.ptr + offset, dtype, shape, strides, value, value.device.id)

    def stream(self, device: int) -> int | None:
        handle: int = self.module.cuda.get_current_stream().ptr
        return handle

    def writable(self, value: Any, name: str) -> Any:
        return value


class Torch:
    """torch.Tensor, on the CPU or a GPU."""

    name = "torch"

    def __init__(self, module: Any) -> None:
        self.module = module
        self.names: dict[Any, str] = {}
        self._tensor, self._strided = module.Tensor, module.strided
        # private, and what torch's own generated code calls (2.11, 2.13): the public way makes a Stream object, 3 us a call
        self._raw_stream = getattr(module._C, "_cuda_getCurrentRawStream", None) or self._public_stream

    def take(self, value: Any, name: str) -> tuple[Any, Place]:
        if not isinstance(value, self._tensor):
            raise CallError("input-kind", f"input {name!r}: expected a torch tensor like the first input, got {kind_of(value)}")
        if value.layout is not self._strided:
            raise CallError("input-kind", f"input {name!r}: expected a dense tensor, got layout {value.layout}")
        if value.is_neg() or value.is_conj():
            value = value.resolve_conj().resolve_neg()  # lazy: the memory holds other numbers
        if value.requires_grad:
            value = value.detach()
        return value, self.read(value)

    def read(self, value: Any) -> Place:
        dtype = value.dtype
        name = self.names.get(dtype)
        if name is None:
            name = self.names[dtype] = str(dtype).removeprefix("torch.")
        device = value.get_device() if value.is_cuda else None if value.is_cpu else -1
        return value.data_ptr(), value.shape, name, None if value.is_contiguous() else value.stride(), device

    def strides(self, value: Any) -> Sequence[int]:
        found: tuple[int, ...] = value.stride()
        return found

    def steps(self, value: Any) -> Sequence[int]:
        size = value.element_size()
        return [stride * size for stride in value.stride()]

    def ordered(self, value: Any, order: Sequence[int]) -> Any:
        back = sorted(range(len(order)), key=lambda axis: order[axis])
        return value.permute(*order).contiguous().permute(*back)

    def aliaser(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Aliaser:
        if not tensor.count(shape):
            return lambda address, owner: self.empty(dtype, shape)
        memory, kind = array_type(span_bytes(shape, strides, DTYPES[dtype])), getattr(self.module, dtype)
        frombuffer, size, steps = self.module.frombuffer, tuple(shape), tuple(strides)

        def alias(address: int, owner: object) -> Any:
            made = memory.from_address(address)
            made.owner = owner
            return frombuffer(made, dtype=kind).as_strided(size, steps)

        return alias

    def alias(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        if device is None or not tensor.count(shape):
            return self.aliaser(dtype, shape, strides)(address, owner) if device is None else self.empty(dtype, shape, device)
        return self.module.from_dlpack(tensor.Tensor(address, dtype, shape, strides, owner, device))

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Any:
        return self.module.zeros(
            tuple(shape), dtype=getattr(self.module, dtype), device="cpu" if device is None else f"cuda:{device}"
        )

    def part(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        kind, value = getattr(self.module, dtype), value.detach()
        if kind is value.dtype:
            return value.as_strided(tuple(shape), tuple(strides), value.storage_offset() + offset // value.element_size())
        begin = value.storage_offset() * value.element_size() + offset
        fresh = self.module.empty(0, dtype=kind, device=value.device)
        return fresh.set_(value.untyped_storage(), begin // fresh.element_size(), tuple(shape), tuple(strides))

    def stream(self, device: int) -> int | None:
        handle: int = self._raw_stream(device)
        return handle

    def _public_stream(self, device: int) -> int:
        handle: int = self.module.cuda.current_stream(device).cuda_stream
        return handle

    def copy(self, value: Any) -> Any:
        return value.clone(memory_format=self.module.contiguous_format)

    def writable(self, value: Any, name: str) -> Any:
        return value.detach()

    def finish(self, value: Any, like: Any) -> Any:
        return value


class Plain:
    """`cgbundle.Tensor`, and every other library through DLPack (JAX, CuPy, ...): the result is turned back by that library's
    `from_dlpack`."""

    name = "plain"

    def take(self, value: Any, name: str) -> tuple[Any, Place]:
        if isinstance(value, tensor.Tensor):
            return value, self.read(value)
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            taken = dlpack.read(value, name)
            return taken, self.read(taken)
        raise CallError(
            "input-kind", f"input {name!r}: expected a NumPy array, a torch tensor or a DLPack tensor, got {kind_of(value)}"
        )

    def read(self, value: tensor.Tensor) -> Place:
        return value.address, value.shape, value.dtype, None if value.contiguous else value.strides, value.device

    def strides(self, value: tensor.Tensor) -> Sequence[int]:
        return value.strides

    def steps(self, value: tensor.Tensor) -> Sequence[int]:
        return [stride * DTYPES[value.dtype] for stride in value.strides]

    def ordered(self, value: tensor.Tensor, order: Sequence[int]) -> tensor.Tensor:
        fresh: tensor.Tensor = self.empty(value.dtype, value.shape, value.device)
        fresh.strides = tensor.dense(value.shape, order)
        tensor.copy(fresh, value)
        return fresh

    def aliaser(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Aliaser:
        return lambda address, owner: tensor.Tensor(address, dtype, shape, strides, owner)

    def alias(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> tensor.Tensor:
        return tensor.Tensor(address, dtype, shape, strides, owner, device)

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> tensor.Tensor:
        if device is not None:
            raise CallError(
                "input-device",
                "a DLPack tensor on a GPU can only be replayed at a recorded size and laid out as recorded",
                "pass torch or CuPy tensors",
            )
        return tensor.empty(dtype, shape)

    def part(self, value: tensor.Tensor, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> tensor.Tensor:
        return tensor.Tensor(value.address + offset, dtype, shape, strides, value.owner, value.device)

    def stream(self, device: int) -> int | None:
        return LEGACY_STREAM

    def copy(self, value: tensor.Tensor) -> tensor.Tensor:
        if value.device is None:
            return value.clone()
        size = span_bytes(value.shape, value.strides, DTYPES[value.dtype])
        made = value.owner.copy_out(value.address, size, LEGACY_STREAM)  # of the runtime's own: no library copies it for us
        return tensor.Tensor(made.address, value.dtype, value.shape, value.strides, made, value.device)

    def writable(self, value: Any, name: str) -> Any:
        if isinstance(value, tensor.Tensor):
            return value
        dlpack.check_writable(value, name)
        return dlpack.read(value, name)

    def finish(self, value: tensor.Tensor, like: Any) -> Any:
        if isinstance(like, tensor.Tensor):
            return value
        module: Any = sys.modules.get(type(like).__module__.partition(".")[0])
        space: Any = like.__array_namespace__() if hasattr(like, "__array_namespace__") else module
        return space.from_dlpack(value) if hasattr(space, "from_dlpack") else value


def library_of(value: Any) -> Library:
    """The library that `value`, an input, belongs to; never imports one."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return Numpy(numpy)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor):
        return Torch(torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return Cupy(cupy)
    return Plain()


def caller_captures() -> bool:
    """Whether the caller's current stream, as far as a library of the caller's knows one, is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    cupy = sys.modules.get("cupy")
    return cupy is not None and hasattr(cupy, "cuda") and bool(cupy.cuda.get_current_stream().is_capturing())
