"""`cgbundle.Tensor`, and through it every library that speaks DLPack (JAX and others): capsules are looked at, not consumed."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES
from ..format.spans import dense, span_of
from .capsules import CODES, Managed
from .library import Descriptor, Library, Wrapper, kind_of
from .tensor import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, Tensor, copy, empty, from_bytes

LEGACY_STREAM = 1
"""CU_STREAM_LEGACY: producers are asked to make their data ready on it, and replays then run in its order."""


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of version 1.0, as far as its flags."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )  # fmt: skip


READ_ONLY = 1
"""DLPACK_FLAG_BITMASK_READ_ONLY."""

IMMUTABLE = ("jax", "jaxlib")
"""Libraries whose arrays never change, whatever a capsule says."""

MOST_AXES, ADDRESSES = 64, 1 << 57
"""Of a tensor; and the addresses that a process can have."""

REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""What methods of a caller's class raise where they do not do what DLPack says."""

_api = ctypes.pythonapi
_capsule_pointer = _api.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule_is = _api["PyCapsule_IsValid"]  # of its own: `_destroy` declares others' arguments
_capsule_is.restype, _capsule_is.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def read(value: Any, name: str) -> tuple[int, str, Sequence[int], Sequence[int] | None, object, int | None]:
    """The memory of any object with `__dlpack__`, as what a `Tensor` is made of; the capsule keeps the object alive.

    Raises input-kind for what cannot be read: other devices than CPU and CUDA, vector lanes, unknown dtypes.
    """
    device_type = _device_type(value, name)
    if device_type not in (CPU, CUDA, CUDA_HOST, CUDA_MANAGED):
        raise CallError("input-kind", f"input {name!r}: DLPack device type {device_type} is neither CPU nor CUDA")
    options = {"stream": LEGACY_STREAM} if device_type in (CUDA, CUDA_MANAGED) else {}
    try:
        capsule = value.__dlpack__(**options)
    except REFUSALS as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CallError("input-kind", f"input {name!r}: its library does not share it: {reason}") from None
    if not _capsule_is(capsule, b"dltensor"):
        kind = type(capsule).__name__
        what = "one that is used up, or of another kind" if kind == "PyCapsule" else kind
        raise CallError("input-kind", f"input {name!r}: expected a DLPack capsule called dltensor, got {what}")
    source = Managed.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    dtype = CODES.get((source.code, source.bits))
    if dtype is None or source.lanes != 1:
        raise CallError(
            "input-kind",
            f"input {name!r}: DLPack dtype (code {source.code}, {source.bits} bits, {source.lanes} lanes) is not supported",
        )
    if not 0 <= source.ndim <= MOST_AXES or (source.ndim and not source.shape):
        told = f"{source.ndim} axes{'' if source.shape else ' and no shape'}"
        raise CallError("input-kind", f"input {name!r}: its DLPack capsule has {told}")
    shape = source.shape[: source.ndim]
    strides = source.strides[: source.ndim] if source.strides else None
    address = (source.data or 0) + source.byte_offset
    check_place(address, dtype, shape, strides, name)
    if source.device_type != device_type:
        text = f"its DLPack capsule is for device type {source.device_type}, and its __dlpack_device__() says {device_type}"
        raise CallError("input-kind", f"input {name!r}: {text}")
    on_host = device_type in (CPU, CUDA_HOST)
    return address, dtype, shape, strides, capsule, None if on_host else source.device_id


def _device_type(value: Any, name: str) -> int:
    try:
        device_type, number = value.__dlpack_device__()
        return operator.index(device_type) + 0 * operator.index(number)
    except REFUSALS:
        raise CallError("input-kind", f"input {name!r}: its __dlpack_device__() gives no device type and number") from None


def check_place(address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None, name: str) -> None:
    """Raises input-kind for a shape, strides or an address that no memory can have."""
    fine = all(size >= 0 for size in shape) and (strides is None or len(strides) == len(shape))
    if fine and 0 not in shape:
        steps = zip(shape, dense(shape) if strides is None else strides, strict=True)
        ends = [(size - 1) * stride * DTYPES[dtype] for size, stride in steps]
        first, last = address + sum(min(0, end) for end in ends), address + sum(max(0, end) for end in ends)
        fine = first > 0 and last < ADDRESSES
    if not fine:
        told = f"shape {list(shape)}, strides {None if strides is None else list(strides)}, address {address:#x}"
        raise CallError("input-kind", f"input {name!r}: no memory has {told}")


def check_writable(value: Any, name: str) -> None:
    """Raises input-unwritable unless an object with `__dlpack__` says, as DLPack 1.0 can, that its memory may be written to."""
    library = type(value).__module__.partition(".")[0]
    if library in IMMUTABLE:
        raise _unwritable(name, f"arrays of {library} never change")
    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except (TypeError, BufferError, RuntimeError):
        capsule = None
    if capsule is None or not _capsule_is(capsule, b"dltensor_versioned"):
        raise _unwritable(name, f"its library ({library}) does not say whether it may be written to")
    if _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned")).flags & READ_ONLY:
        raise _unwritable(name, f"its library ({library}) shares it read-only")


def _unwritable(name: str, reason: str) -> CallError:
    hint = "pass a copy of it as a NumPy array, a torch tensor or a cgbundle.Tensor"
    return CallError("input-unwritable", f"input {name!r}: the model writes to it, and {reason}", hint)


def _check(value: Tensor, name: str) -> None:
    """Raises input-kind for a tensor that the caller has made of what is none."""
    numbers = [value.address, *value.shape, *value.strides, *(() if value.device is None else (value.device,))]
    if value.dtype not in DTYPES or any([type(number) is not int for number in numbers]):
        raise CallError("input-kind", f"input {name!r}: a cgbundle.Tensor of numbers and a dtype that are none")
    if value.device is None:
        check_place(value.address, value.dtype, value.shape, value.strides, name)


def can_be_asked(value: Any) -> bool:
    """Whether an object of the caller's says without raising which attributes it has."""
    try:
        hasattr(value, "__dlpack__")
    except REFUSALS:
        return False
    return True


class DLPack(Library):
    """Tensors of our own; results go back to another library through its `from_dlpack`."""

    name = "dlpack"

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        if isinstance(value, Tensor):
            known = value._taken  # of a tensor that is given again nothing is asked again: a server's calls have eleven of them
            if known is not None and (
                known[0] is value.address and known[1] is value.shape and known[2] is value.dtype
                and known[3] is value.strides and known[4] is value.device
            ):  # fmt: skip
                return value, known[5]
            _check(value, name)
            descriptor = self.describe(value)
            if type(value.shape) is type(value.strides) is tuple:  # which nobody changes in place
                value._taken = (value.address, value.shape, value.dtype, value.strides, value.device, descriptor)
            return value, descriptor
        if can_be_asked(value) and hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            taken = Tensor(*read(value, name))
            return taken, self.describe(taken)
        raise CallError(
            "input-kind", f"input {name!r}: expected a NumPy array, a torch tensor or a DLPack tensor, got {kind_of(value)}"
        )

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
            raise CallError(
                "input-device",
                "a DLPack tensor on a GPU can only be replayed at a recorded size and laid out as recorded",
                "pass torch or CuPy tensors",
            )
        return empty(dtype, shape)

    def as_strided(self, value: Tensor, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        return Tensor(value.address + offset, dtype, shape, strides, value.owner, value.device)

    def stream(self, device: int) -> int | None:
        return LEGACY_STREAM

    def copy(self, value: Tensor) -> Tensor:
        if value.device is None:
            return value.clone()
        size = max(1, span_of(value.dtype, value.shape, value.strides))
        output = value.owner.copy_out(value.address, size, LEGACY_STREAM)  # of the runtime's own: no library copies it for us
        return Tensor(output.address, value.dtype, value.shape, value.strides, output, value.device)

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return cast(value, dtype)

    def writable(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return value
        check_writable(value, name)
        return Tensor(*read(value, name))

    def converted(self, value: Tensor, like: Any) -> Any:
        if isinstance(like, Tensor):
            return value
        module: Any = sys.modules.get(type(like).__module__.partition(".")[0])
        space: Any = like.__array_namespace__() if hasattr(like, "__array_namespace__") else module
        return space.from_dlpack(value) if hasattr(space, "from_dlpack") else value


def cast(value: Tensor, dtype: str) -> Tensor:
    """A row-major copy with elements of `dtype`, to which the cast is safe.  Raises input-device for memory of a GPU."""
    if value.device is not None:
        hint = "cast it before the call, or pass torch or CuPy tensors"
        raise CallError("input-device", "a DLPack tensor on a GPU is not cast", hint)
    from .numbers import PARTS, decode, encoded  # few calls need a cast

    numbers = decode(value.dtype, value.tobytes())
    if dtype in PARTS and value.dtype not in PARTS:
        numbers = list(chain.from_iterable((number, 0) for number in numbers))
    return from_bytes(encoded(numbers, PARTS.get(dtype, dtype)), dtype, value.shape)
