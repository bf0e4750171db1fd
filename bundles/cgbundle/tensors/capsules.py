"""Tensors out by DLPack.  Layouts of structures are those of dlpack.h, version 0.8 (DLManagedTensor)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence

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
