"""A tensor without a tensor library: an address, a dtype, a shape and whoever keeps the memory alive; and its way out by DLPack.

The runtime takes DLPack inputs apart with these, and hands them out when the caller uses neither NumPy nor torch.  Layouts of
structures are those of dlpack.h, version 0.8 (DLManagedTensor).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..format.schema import DTYPES

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""DLDeviceType."""

CODES = {(0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (1, 16): "uint16",
          (1, 32): "uint32", (1, 64): "uint64", (2, 16): "float16", (2, 32): "float32", (2, 64): "float64",
          (4, 16): "bfloat16", (5, 64): "complex64", (5, 128): "complex128", (6, 8): "bool",
          (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}  # fmt: skip
_NAMES = {name: code for code, name in CODES.items()}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Tensor:
    """`shape` and `strides` in elements, `address` in bytes, in CPU memory unless `device` is a CUDA device number; `owner` keeps
    the memory alive.  Speaks DLPack and, on the CPU, NumPy's `__array_interface__`."""

    __slots__ = ("_capsule", "address", "device", "dtype", "owner", "shape", "strides")

    def __init__(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None, owner: Any, device: int | None = None
    ) -> None:
        self.address = address
        self.dtype = dtype
        self.shape = tuple(shape)
        self.strides = dense(shape) if strides is None else tuple(strides)
        self.device = device
        self.owner = owner
        self._capsule: object = None

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        return is_dense(self.shape, self.strides)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        """A view of ranges with step 1 along every axis."""
        offset, shape = 0, []
        for part, size, stride in zip(slices, self.shape, self.strides, strict=True):
            start, stop, _ = part.indices(size)
            offset += start * stride
            shape.append(max(0, stop - start))
        return Tensor(self.address + offset * DTYPES[self.dtype], self.dtype, shape, self.strides, self.owner, self.device)

    def __setitem__(self, slices: tuple[slice, ...], value: Tensor) -> None:
        """Copies `value`, of the same shape and dtype as the range, into it."""
        copy(self[slices], value)

    def clone(self) -> Tensor:
        """A row-major copy in memory of its own.  Raises BufferError on a GPU, as `tobytes` does."""
        fresh = empty(self.dtype, self.shape)
        copy(fresh, self)
        return fresh

    def tobytes(self) -> bytes:
        """The elements row-major."""
        _check_near(self)
        source = self if self.contiguous else self.clone()
        return ctypes.string_at(source.address, prod(self.shape) * DTYPES[self.dtype])

    def tolist(self) -> Any:
        """Nested lists of Python numbers; bfloat16, float16 and float8 as floats."""
        from .numbers import decode  # few tensors are read as Python's numbers

        numbers = decode(self.dtype, self.tobytes())
        if self.dtype.startswith("complex"):
            numbers = list(map(complex, numbers[::2], numbers[1::2]))
        return _nest(numbers, self.shape)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        kinds = {"float": "f", "int": "i", "uint": "u", "bool": "b", "complex": "c"}
        kind = kinds.get(self.dtype.rstrip("0123456789"))
        if kind is None or self.device is not None:
            raise AttributeError("__array_interface__")  # bfloat16 and float8 have no NumPy dtype
        size = DTYPES[self.dtype]
        strides = tuple(stride * size for stride in self.strides)
        return {"version": 3, "shape": self.shape, "typestr": f"<{kind}{size}", "data": (self.address, False), "strides": strides}

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> object:
        if (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()) or (copy and self.device is not None):
            raise BufferError(f"cgbundle.Tensor({_kind(self)}) can be shared where it lies only")
        source = self.clone() if copy else self
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(source, "__array_interface__"):
            return numpy.asarray(source).__dlpack__()  # lets go in C: see `export`
        owner = source.owner  # not the tensor itself, which holds the capsule
        capsule = export(source.address, source.dtype, source.shape, source.strides, owner, source.__dlpack_device__())
        source._capsule = _Kept(capsule)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self.device is None else (CUDA, self.device)

    def __repr__(self) -> str:
        """One line, with values where they lie in CPU memory: nobody waits for a GPU to see a tensor's name."""
        if self.device is not None:
            return f"cgbundle.Tensor({_kind(self)})"
        from .numbers import values  # few tensors are printed

        def read(at: int) -> Any:
            return Tensor(self.address + at * DTYPES[self.dtype], self.dtype, (), (), self.owner).tolist()

        return f"cgbundle.Tensor({_kind(self)}: {values(self.shape, self.strides, read)})"


class _Kept:
    """Keeps a capsule, and lets go of it here: see `export`.  Only a tensor that is exported has one: an interrupt that
    comes in `__del__` is lost."""

    __slots__ = ("capsule",)

    def __init__(self, capsule: object) -> None:
        self.capsule: object = capsule

    def __del__(self) -> None:
        self.capsule = None


def empty(dtype: str, shape: Sequence[int]) -> Tensor:
    """A row-major tensor of zeros in fresh CPU memory."""
    memory = (ctypes.c_char * max(1, prod(shape) * DTYPES[dtype]))()
    return Tensor(ctypes.addressof(memory), dtype, shape, None, memory)


def from_bytes(data: Any, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor over a copy of `data` (anything with the buffer protocol).  Raises ValueError when the length does not fit."""
    raw = bytes(data)
    if len(raw) != prod(shape) * DTYPES[dtype]:
        raise ValueError(f"{len(raw)} bytes do not make {dtype} {list(shape)}")
    fresh = empty(dtype, shape)
    ctypes.memmove(fresh.address, raw, len(raw))
    return fresh


def copy(target: Tensor, source: Tensor) -> None:
    """Copies elements between tensors of one shape and dtype in CPU memory, in runs as long as both layouts allow."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"cannot copy {_kind(source)} into {_kind(target)}")
    _check_near(target)
    _check_near(source)
    size = DTYPES[target.dtype]
    if 0 in target.shape:
        return
    axes = [axis for axis in zip(target.shape, target.strides, source.strides, strict=True) if axis[0] != 1]
    run = size
    while axes and axes[-1][1] * size == run and axes[-1][2] * size == run:
        run *= axes.pop()[0]
    _copy(target.address, source.address, axes, run, size)


def _kind(tensor: Tensor) -> str:
    place = "cpu" if tensor.device is None else f"cuda:{tensor.device}"
    return f"{tensor.dtype}, {list(tensor.shape)}, {place}"


def _check_near(tensor: Tensor) -> None:
    if tensor.device is not None:
        raise BufferError(f"cgbundle.Tensor({_kind(tensor)}) lies on a GPU: read and write it with torch.from_dlpack or the like")


def _copy(target: int, source: int, axes: list[tuple[int, int, int]], run: int, size: int) -> None:
    if not axes:
        ctypes.memmove(target, source, run)
        return
    (length, into, out), rest = axes[0], axes[1:]
    for index in range(length):
        _copy(target + index * into * size, source + index * out * size, rest, run, size)


def dense(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides in elements of a tensor without gaps whose axes lie in memory in `order`, outermost first (default: row-major)."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int], order: Sequence[int] | None = None) -> bool:
    """Whether `strides` are those of `dense`, where they matter (an axis of size 1 may have any)."""
    if 0 in shape:
        return True
    return all(size == 1 or have == want for size, have, want in zip(shape, strides, dense(shape, order), strict=True))


def moving(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that matter: none of an axis of one element, nor of a tensor without any."""
    return [] if 0 in shape else [stride for size, stride in zip(shape, strides, strict=True) if size != 1]


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory: as they are for a row-major tensor, else by descending stride."""
    axes = range(len(shape))
    return tuple(axes) if is_dense(shape, strides) else tuple(sorted(axes, key=lambda axis: (-strides[axis], axis)))


def _nest(flat: list[Any], shape: Sequence[int]) -> Any:
    if not shape:
        return flat[0]
    if len(shape) == 1:  # not element by element: a server does this for every answer
        return flat
    step = prod(shape[1:])
    return [_nest(flat[index * step : (index + 1) * step], shape[1:]) for index in range(shape[0])]


# --- out by DLPack --------------------------------------------------------------------------------------------------

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_api = ctypes.pythonapi
_capsule_new = _api.PyCapsule_New
_capsule_new.restype, _capsule_new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def export(
    address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: tuple[int, int]
) -> object:
    """A capsule over memory that `owner` keeps, until its consumer lets go; `device` as `__dlpack_device__` gives it.

    A consumer that refuses drops the capsule with its exception set, which a callback written in Python would lose.  So a tensor
    holds its last capsule itself and lets go in `__del__`, where Python has put exceptions aside.  NumPy, whose callbacks are
    written in C, is preferred where the caller uses it.
    """
    rank = len(shape)
    managed = Managed()
    sizes, steps = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)(*strides)
    managed.tensor = _DLTensor(
        address, *device, rank, *_NAMES[dtype], 1,
        ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)), ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    kept = (managed, sizes, steps, owner)
    _api.Py_IncRef(ctypes.py_object(kept))
    managed.context = id(kept)
    return _capsule_new(ctypes.addressof(managed), b"dltensor", ctypes.cast(_destroy, ctypes.c_void_p).value)


@_Deleter
def _delete(address: int, ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """The consumer is done: drop the reference that `export` took (after this the structure itself is gone).  While the interpreter
    ends, modules' names are None, and nothing is dropped."""
    if ending():
        return
    _api.Py_DecRef(ctypes.cast(Managed.from_address(address).context, ctypes.py_object))


@_Deleter
def _destroy(capsule: int, ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """The capsule dies; when nobody consumed it (it still has its first name) the tensor is released here."""
    if ending():
        return
    _is_valid = _api.PyCapsule_IsValid
    _is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    if _is_valid(capsule, b"dltensor"):
        pointer = _api["PyCapsule_GetPointer"]
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
        _delete(pointer(capsule, b"dltensor"))
