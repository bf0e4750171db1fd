"""Structures that the CUDA driver's functions take, as cuda.h declares them. They take 1.3 ms of an import, so a load imports them
while another thread creates the GPU's context."""

from __future__ import annotations

import ctypes
from ctypes import POINTER

_Pointer, _Size, _Int, _Unsigned, _Byte = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_ubyte
_Address = ctypes.c_uint64


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle: identifies an allocation for other processes."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class KernelNodeParams(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("func", _Pointer), ("gridDimX", _Unsigned), ("gridDimY", _Unsigned), ("gridDimZ", _Unsigned),
        ("blockDimX", _Unsigned), ("blockDimY", _Unsigned), ("blockDimZ", _Unsigned), ("sharedMemBytes", _Unsigned),
        ("kernelParams", _Pointer), ("extra", _Pointer), ("kern", _Pointer), ("ctx", _Pointer),
    )  # fmt: skip


class MemsetNodeParams(ctypes.Structure):  # CUDA_MEMSET_NODE_PARAMS_v1
    _fields_ = (
        ("dst", _Address), ("pitch", _Size), ("value", _Unsigned), ("elementSize", _Unsigned), ("width", _Size), ("height", _Size),
    )  # fmt: skip


class Memcpy3D(ctypes.Structure):  # CUDA_MEMCPY3D_v2
    _fields_ = (
        ("srcXInBytes", _Size), ("srcY", _Size), ("srcZ", _Size), ("srcLOD", _Size), ("srcMemoryType", _Int),
        ("srcHost", _Pointer), ("srcDevice", _Address), ("srcArray", _Pointer), ("reserved0", _Pointer),
        ("srcPitch", _Size), ("srcHeight", _Size),
        ("dstXInBytes", _Size), ("dstY", _Size), ("dstZ", _Size), ("dstLOD", _Size), ("dstMemoryType", _Int),
        ("dstHost", _Pointer), ("dstDevice", _Address), ("dstArray", _Pointer), ("reserved1", _Pointer),
        ("dstPitch", _Size), ("dstHeight", _Size),
        ("WidthInBytes", _Size), ("Height", _Size), ("Depth", _Size),
    )  # fmt: skip


class LaunchAttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, also CUkernelNodeAttrValue. Recorded attributes use up to three 32-bit words of it, or two bytes."""

    _fields_ = (("pad", _Byte * 64), ("_aligned", ctypes.c_uint64))


class LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", _Int), ("pad", _Byte * 4), ("value", LaunchAttributeValue))


class LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("gridDimX", _Unsigned), ("gridDimY", _Unsigned), ("gridDimZ", _Unsigned),
        ("blockDimX", _Unsigned), ("blockDimY", _Unsigned), ("blockDimZ", _Unsigned), ("sharedMemBytes", _Unsigned),
        ("hStream", _Pointer), ("attrs", POINTER(LaunchAttribute)), ("numAttrs", _Unsigned),
    )  # fmt: skip


class EdgeData(ctypes.Structure):  # CUgraphEdgeData
    _fields_ = (("from_port", _Byte), ("to_port", _Byte), ("type", _Byte), ("reserved", _Byte * 5))


class ConditionalParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS.  `phGraph_out` is the driver's array of the graphs of the bodies."""

    _fields_ = (
        ("handle", ctypes.c_uint64), ("type", _Int), ("size", _Unsigned), ("phGraph_out", POINTER(_Address)), ("ctx", _Pointer),
    )  # fmt: skip


class ConditionalNodeParams(ctypes.Structure):
    """CUgraphNodeParams, of whose union one member is needed."""

    _fields_ = (
        ("type", _Int), ("reserved0", _Int * 3), ("conditional", ConditionalParams),
        ("reserved1", ctypes.c_int64 * 25), ("reserved2", ctypes.c_int64),
    )  # fmt: skip


class MemLocation(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", _Int), ("id", _Int))


class AllocationProp(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", _Int), ("requestedHandleTypes", _Int), ("location", MemLocation), ("win32HandleMetaData", _Pointer),
        ("allocFlags", _Byte * 8),
    )  # fmt: skip


class AccessDesc(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", MemLocation), ("flags", _Int))
