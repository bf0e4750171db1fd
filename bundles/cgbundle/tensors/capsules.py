"""Export and import of DLPack capsules. Input capsules are read, not consumed. Structures are those of dlpack.h, version 0.8."""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CallError
from .library import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, LEGACY_STREAM, check_place, kind_of

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


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_api = ctypes.pythonapi
_capsule_new = _api.PyCapsule_New
_capsule_new.restype, _capsule_new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def export(
    address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: tuple[int, int]
) -> object:
    """A capsule over memory that `owner` keeps alive until the consumer releases it; `device` as in `__dlpack_device__`. A consumer
    that refuses frees the capsule while an exception is set, which a callback in Python would lose. So a tensor keeps its last
    capsule, and releases it in `__del__`, where Python saves exceptions. NumPy, if loaded, exports instead: its callbacks are in
    C."""
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
    """Called by the consumer: drops the reference of `export`. At interpreter exit module globals are None, and nothing is
    dropped."""
    if ending():
        return
    _api.Py_DecRef(ctypes.cast(Managed.from_address(address).context, ctypes.py_object))


@_Deleter
def _destroy(capsule: int, ending: Callable[[], bool] = sys.is_finalizing) -> None:
    """Called when the capsule is freed: releases the tensor if nobody consumed it (then the name is unchanged)."""
    if ending():
        return
    _is_valid = _api.PyCapsule_IsValid
    _is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    if _is_valid(capsule, b"dltensor"):
        pointer = _api["PyCapsule_GetPointer"]
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
        _delete(pointer(capsule, b"dltensor"))


# --- import -----------------------------------------------------------------------------------------------------------


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of version 1.0, up to its flags."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )  # fmt: skip


READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
IMMUTABLE = ("jax", "jaxlib")  # libraries whose arrays never change, whatever a capsule says
MOST_AXES = 64

REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""Exceptions of a caller's class that does not implement DLPack."""

_capsule_pointer = _api.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule_is = _api["PyCapsule_IsValid"]  # a separate object: `_destroy` declares other argument types
_capsule_is.restype, _capsule_is.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def read(value: Any, name: str) -> tuple[int, str, Sequence[int], Sequence[int] | None, object, int | None]:
    """The arguments of a `Tensor` over an object with `__dlpack__`; the capsule keeps the object alive. Raises input-kind for other
    devices than CPU and CUDA, vector lanes, unknown dtypes."""

    def refused(text: str) -> CallError:
        return CallError("input-kind", f"input {name!r}: {text}")

    if not (can_be_asked(value) and hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        raise refused(f"expected a NumPy array, a torch tensor or a DLPack tensor, got {kind_of(value)}")
    try:
        device_type, number = value.__dlpack_device__()
        device_type = operator.index(device_type) + 0 * operator.index(number)
    except REFUSALS:
        raise refused("its __dlpack_device__() gives no device type and number") from None
    if device_type not in (CPU, CUDA, CUDA_HOST, CUDA_MANAGED):
        raise refused(f"DLPack device type {device_type} is neither CPU nor CUDA")
    try:
        capsule = value.__dlpack__(**({"stream": LEGACY_STREAM} if device_type in (CUDA, CUDA_MANAGED) else {}))
    except REFUSALS as error:
        raise refused(f"its library does not export it: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
    if not _capsule_is(capsule, b"dltensor"):
        kind = type(capsule).__name__
        what = "one that is used up, or of another kind" if kind == "PyCapsule" else kind
        raise refused(f"expected a DLPack capsule called dltensor, got {what}")
    source = Managed.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    dtype = CODES.get((source.code, source.bits))
    if dtype is None or source.lanes != 1:
        raise refused(f"DLPack dtype (code {source.code}, {source.bits} bits, {source.lanes} lanes) is not supported")
    if not 0 <= source.ndim <= MOST_AXES or (source.ndim and not source.shape):
        raise refused(f"its DLPack capsule has {source.ndim} axes{'' if source.shape else ' and no shape'}")
    shape = source.shape[: source.ndim]
    strides = source.strides[: source.ndim] if source.strides else None
    address = (source.data or 0) + source.byte_offset
    check_place(address, dtype, shape, strides, name)
    if source.device_type != device_type:
        raise refused(f"its DLPack capsule is for device type {source.device_type}, and its __dlpack_device__() says {device_type}")
    return address, dtype, shape, strides, capsule, None if device_type in (CPU, CUDA_HOST) else source.device_id


def check_writable(value: Any, name: str) -> None:
    """Raises input-unwritable unless the object says, by DLPack 1.0, that it allows writes."""
    library, reason = type(value).__module__.partition(".")[0], ""
    try:
        capsule = value.__dlpack__(max_version=(1, 0)) if library not in IMMUTABLE else None
    except (TypeError, BufferError, RuntimeError):
        capsule = None
    if library in IMMUTABLE:
        reason = f"arrays of {library} never change"
    elif capsule is None or not _capsule_is(capsule, b"dltensor_versioned"):
        reason = f"its library ({library}) does not say whether it may be written to"
    elif _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned")).flags & READ_ONLY:
        reason = f"its library ({library}) shares it read-only"
    if reason:
        hint = "pass a copy of it as a NumPy array, a torch tensor or a cgbundle.Tensor"
        raise CallError("input-unwritable", f"input {name!r}: the model writes to it, and {reason}", hint)


def can_be_asked(value: Any) -> bool:
    """Whether `hasattr` works on an object of the caller's class, and does not raise."""
    try:
        hasattr(value, "__dlpack__")
    except REFUSALS:
        return False
    return True
