"""The CUDA driver as the recorder uses it: `check` for the tuples (error, value, ...) of cuda-bindings, and reads of memory."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from ...errors import BuildError
from ..take import Pointee

__all__ = ["allocation", "check", "driver", "inspect_pointer", "read_device", "succeeded"]


def succeeded(result: tuple[Any, ...]) -> bool:
    """Whether a driver call succeeded."""
    return int(result[0]) == 0


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call (None, one value, or a tuple of them).  Raises driver-call-failed."""
    if int(result[0]):
        error, name = driver.cuGetErrorName(result[0])
        text = name.decode() if int(error) == 0 else str(result[0])
        raise BuildError("driver-call-failed", f"a CUDA driver call failed with {text} ({int(result[0])})")
    if len(result) <= 2:
        return result[1] if len(result) == 2 else None
    return result[1:]


def read_device(address: int, size: int) -> bytes:
    """`size` bytes of device memory.  Raises driver-call-failed."""
    if not size:
        return b""
    data = bytearray(size)
    view = (ctypes.c_char * size).from_buffer(data)
    check(driver.cuMemcpyDtoH(ctypes.addressof(view), driver.CUdeviceptr(address), size))
    return bytes(data)


def allocation(address: int) -> tuple[int, int] | None:
    """(start, bytes) of the device allocation that holds `address`, or None."""
    result = driver.cuMemGetAddressRange(driver.CUdeviceptr(address))
    return (int(result[1]), int(result[2])) if succeeded(result) else None


def inspect_pointer(address: int) -> Pointee | None:
    """What the driver knows about an address: None when it is none, or not alive."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    result = driver.cuPointerGetAttribute(attribute, driver.CUdeviceptr(address))
    if not succeeded(result):
        return None
    if int(result[1]) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST):
        return Pointee(kind="host", start=0, size=0)
    block = allocation(address)
    if block is None or not succeeded(driver.cuPointerGetAttribute(attribute, driver.CUdeviceptr(block[0] + block[1] - 1))):
        return None
    return Pointee(kind="device", start=block[0], size=block[1])
