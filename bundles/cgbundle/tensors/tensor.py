"""A tensor without a tensor library, for DLPack inputs and for callers without NumPy and torch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES
from ..format.shapes import dense, is_dense, span_of
from .library import CPU, CUDA, LEGACY_STREAM, Descriptor, Library, Wrapper, check_place


class Tensor:
    """`shape` and `strides` count elements.  `address` is in CPU memory, or in the memory of the CUDA device number `device`.
    `owner` keeps the memory alive.  Supports DLPack and, on the CPU, NumPy's `__array_interface__`."""

    __slots__ = ("_capsule", "_taken", "address", "device", "dtype", "owner", "shape", "strides")

    def __init__(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None, owner: Any, device: int | None = None
    ) -> None:
        self.address = address  # one by one: every call creates tensors, and unpacking a tuple takes longer
        self.dtype = dtype
        self.shape = tuple(shape)
        self.strides = dense(shape) if strides is None else tuple(strides)
        self.device = device
        self.owner = owner
        self._capsule: object = None
        self._taken: tuple[Any, ...] | None = None  # the result of `DLPack.take`

    @property
    def contiguous(self) -> bool:
        """Whether the elements are row-major and dense."""
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
        """A row-major copy.  Raises BufferError on a GPU, as `tobytes` does."""
        fresh = empty(self.dtype, self.shape)
        copy(fresh, self)
        return fresh

    def tobytes(self) -> bytes:
        """The bytes of the elements, row-major."""
        _check_on_cpu(self)
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
            raise BufferError(f"cgbundle.Tensor({_kind(self)}) can be shared only on its own device, from a GPU without a copy")
        source = self.clone() if copy else self
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(source, "__array_interface__"):
            return numpy.asarray(source).__dlpack__()  # NumPy releases in C: see `capsules.export`
        from .capsules import export  # few callers export these tensors

        owner = source.owner  # not the tensor itself, which refers to the capsule
        capsule = export(source.address, source.dtype, source.shape, source.strides, owner, source.__dlpack_device__())
        source._capsule = _Kept(capsule)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self.device is None else (CUDA, self.device)

    def __repr__(self) -> str:
        """One line; with values if they are in CPU memory, because printing must not wait for a GPU."""
        if self.device is not None:
            return f"cgbundle.Tensor({_kind(self)})"
        from .numbers import values  # few tensors are printed

        def read(at: int) -> Any:
            return Tensor(self.address + at * DTYPES[self.dtype], self.dtype, (), (), self.owner).tolist()

        return f"cgbundle.Tensor({_kind(self)}: {values(self.shape, self.strides, read)})"


class _Kept:
    """Releases a capsule in `__del__` (see `capsules.export`). Only exported tensors have one: `__del__` loses interrupts."""

    __slots__ = ("capsule",)

    def __init__(self, capsule: object) -> None:
        self.capsule: object = capsule

    def __del__(self) -> None:
        self.capsule = None


def empty(dtype: str, shape: Sequence[int]) -> Tensor:
    memory = (ctypes.c_char * max(1, prod(shape) * DTYPES[dtype]))()
    return Tensor(ctypes.addressof(memory), dtype, shape, None, memory)


def from_bytes(data: Any, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor over a copy of a buffer. Raises ValueError for another length."""
    raw = bytes(data)
    if len(raw) != prod(shape) * DTYPES[dtype]:
        raise ValueError(f"{len(raw)} bytes do not make {dtype} {list(shape)}")
    fresh = empty(dtype, shape)
    ctypes.memmove(fresh.address, raw, len(raw))
    return fresh


def copy(target: Tensor, source: Tensor) -> None:
    """Copies between CPU tensors of one shape and dtype, in the longest runs that both layouts allow."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"cannot copy {_kind(source)} into {_kind(target)}")
    _check_on_cpu(target)
    _check_on_cpu(source)
    size = DTYPES[target.dtype]
    if 0 in target.shape:
        return
    axes = [axis for axis in zip(target.shape, target.strides, source.strides, strict=True) if axis[0] != 1]
    run = size
    while axes and axes[-1][1] * size == run and axes[-1][2] * size == run:
        run *= axes.pop()[0]
    _copy(target.address, source.address, axes, run, size)


def _copy(target: int, source: int, axes: list[tuple[int, int, int]], run: int, size: int) -> None:
    if not axes:
        ctypes.memmove(target, source, run)
        return
    (length, into, out), rest = axes[0], axes[1:]
    for index in range(length):
        _copy(target + index * into * size, source + index * out * size, rest, run, size)


def _kind(tensor: Tensor) -> str:
    place = "cpu" if tensor.device is None else f"cuda:{tensor.device}"
    return f"{tensor.dtype}, {list(tensor.shape)}, {place}"


def _check_on_cpu(tensor: Tensor) -> None:
    if tensor.device is not None:
        raise BufferError(f"cgbundle.Tensor({_kind(tensor)}) lies on a GPU: read and write it with torch.from_dlpack or the like")


def _nest(flat: list[Any], shape: Sequence[int]) -> Any:
    if not shape:
        return flat[0]
    if len(shape) == 1:  # no loop over elements: a server does this for every answer
        return flat
    step = prod(shape[1:])
    return [_nest(flat[index * step : (index + 1) * step], shape[1:]) for index in range(shape[0])]


# --- the library ---------------------------------------------------------------------------------------------------------


class DLPack(Library):
    """Tensors of the runtime and of DLPack; results go to another library by its `from_dlpack`."""

    name = "dlpack"

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        if isinstance(value, Tensor):
            cached = value._taken  # each tensor is checked once: a server passes the same eleven at every call
            if cached is not None and (
                cached[0] is value.address and cached[1] is value.shape and cached[2] is value.dtype
                and cached[3] is value.strides and cached[4] is value.device
            ):  # fmt: skip
                return value, cached[5]
            numbers = [value.address, *value.shape, *value.strides, *(() if value.device is None else (value.device,))]
            if value.dtype not in DTYPES or any([type(number) is not int for number in numbers]):
                text = f"input {name!r}: a cgbundle.Tensor with an invalid dtype, address, shape, strides or device"
                raise CallError("input-kind", text)
            if value.device is None:
                check_place(value.address, value.dtype, value.shape, value.strides, name)
            descriptor = self.describe(value)
            if type(value.shape) is type(value.strides) is tuple:  # nobody can change tuples in place
                value._taken = (value.address, value.shape, value.dtype, value.strides, value.device, descriptor)
            return value, descriptor
        from .capsules import read  # for tensors of other libraries only

        imported = Tensor(*read(value, name))
        return imported, self.describe(imported)

    def describe(self, value: Tensor) -> Descriptor:
        return value.address, value.shape, value.dtype, None if value.contiguous else value.strides, value.device

    def strides(self, value: Tensor) -> Sequence[int]:
        return value.strides

    def byte_strides(self, value: Tensor) -> Sequence[int]:
        return [stride * DTYPES[value.dtype] for stride in value.strides]

    def ordered(self, value: Tensor, order: Sequence[int]) -> Tensor:
        fresh: Tensor = self.empty(value.dtype, value.shape, value.device)
        fresh.strides = dense(value.shape, order)
        copy(fresh, value)
        return fresh

    def wrapper(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Wrapper:
        return lambda address, owner: Tensor(address, dtype, shape, strides, owner)

    def wrap(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Tensor:
        return Tensor(address, dtype, shape, strides, owner, device)

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Tensor:
        if device is not None:
            text = "a DLPack tensor on a GPU can only be replayed at a recorded size and laid out as recorded"
            raise CallError("input-device", text, "pass torch or CuPy tensors")
        return empty(dtype, shape)

    def as_strided(self, value: Tensor, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        return Tensor(value.address + offset, dtype, shape, strides, value.owner, value.device)

    def stream(self, device: int) -> int | None:
        return LEGACY_STREAM

    def copy(self, value: Tensor) -> Tensor:
        if value.device is None:
            return value.clone()
        size = max(1, span_of(value.dtype, value.shape, value.strides))
        output = value.owner.copy_out(value.address, size, LEGACY_STREAM)  # no library can copy the runtime's memory
        return Tensor(output.address, value.dtype, value.shape, value.strides, output, value.device)

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        if value.device is not None:
            hint = "cast it before the call, or pass torch or CuPy tensors"
            raise CallError("input-device", "a DLPack tensor on a GPU is not cast", hint)
        from .numbers import PARTS, decode, encoded  # few calls need a cast

        numbers = decode(value.dtype, value.tobytes())
        if dtype in PARTS and value.dtype not in PARTS:
            numbers = list(chain.from_iterable((number, 0) for number in numbers))
        return from_bytes(encoded(numbers, PARTS.get(dtype, dtype)), dtype, value.shape)

    def writable(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return value
        from .capsules import check_writable, read

        check_writable(value, name)
        return Tensor(*read(value, name))

    def converted(self, value: Tensor, like: Any) -> Any:
        if isinstance(like, Tensor):
            return value
        module: Any = sys.modules.get(type(like).__module__.partition(".")[0])
        space: Any = like.__array_namespace__() if hasattr(like, "__array_namespace__") else module
        return space.from_dlpack(value) if hasattr(space, "from_dlpack") else value
