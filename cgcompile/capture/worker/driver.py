"""Helpers for the CUDA driver: unpack the result tuples (error, value, ...) of cuda-bindings, and read and inspect memory."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from ...errors import BuildError
from ..take import Pointee

__all__ = ["allocation", "check", "driver", "inspect_pointer", "read_device", "succeeded"]


def succeeded(result: tuple[Any, ...]) -> bool:
    return int(result[0]) == 0


def check(result: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call: None, one value, or a tuple.  Raises driver-call-failed."""
    if int(result[0]):
        error, name = driver.cuGetErrorName(result[0])
        text = name.decode() if int(error) == 0 else str(result[0])
        raise BuildError("driver-call-failed", f"a CUDA driver call failed with {text} ({int(result[0])})")
    if len(result) <= 2:
        return result[1] if len(result) == 2 else None
    return result[1:]


def read_device(address: int, size: int) -> bytes:
    """Copies `size` bytes of device memory to the host.  Raises driver-call-failed."""
    if not size:
        return b""
    data = bytearray(size)
    view = (ctypes.c_char * size).from_buffer(data)
    check(driver.cuMemcpyDtoH(ctypes.addressof(view), driver.CUdeviceptr(address), size))
    return bytes(data)


def allocation(address: int) -> tuple[int, int] | None:
    """Returns (start, bytes) of the device allocation that contains `address`, or None."""
    result = driver.cuMemGetAddressRange(driver.CUdeviceptr(address))
    return (int(result[1]), int(result[2])) if succeeded(result) else None


def inspect_pointer(address: int) -> Pointee | None:
    """Returns the allocation that contains an address, or None if the driver knows no live one."""
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
