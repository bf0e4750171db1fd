"""Bindings of the CUDA driver's functions in libcuda.so.1; structures.py has the structures. The package cuda-bindings is not used:
its import takes 0.1 s. Layouts, types and numbers are those of cuda.h; symbols with a version never change, and are looked up on
first use. `Driver` has the functions by cuda.h's names: those without results return their error (0 for success), others a tuple of
the error and the results. Handles and addresses are integers; calls release the interpreter's lock."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref

from ..errors import MachineError

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from .structures import EdgeData

LIBRARY = "libcuda.so.1"
_RTLD_NOW = 2

STREAM_NON_BLOCKING, EVENT_DEFAULT, EVENT_DISABLE_TIMING = 1, 0, 2
CAPTURE_MODE_RELAXED, SET_CAPTURE_DEPENDENCIES, INSTANTIATE_USE_NODE_PRIORITY = 2, 1, 8
MEMORY_TYPE_HOST, MEMORY_TYPE_DEVICE, POINTER_MEMORY_TYPE = 1, 2, 2
NODE_TYPE_CONDITIONAL, CONDITION_IF, CONDITION_WHILE, CONDITION_SWITCH = 13, 0, 1, 2
MULTIPROCESSORS, COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 16, 75, 76
MEM_PINNED, MEM_DEVICE, MEM_FILE_DESCRIPTOR, MEM_ACCESS_READ_WRITE = 1, 1, 1, 3
INVALID_VALUE, PEER_ENABLED_BEFORE = 1, 704

_Pointer, _Size, _Int, _Unsigned, _Byte = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_ubyte
_Address = ctypes.c_uint64  # receives a handle or an address: unlike a pointer, its value is an integer also for 0


class _Out:
    """A parameter that points to a result."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind


_HANDLE, _NUMBER, _BYTES, _MILLISECONDS, _TEXT = map(_Out, (_Address, _Int, _Size, ctypes.c_float, ctypes.c_char_p))

FUNCTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cuInit": ("cuInit", (_Unsigned,)),
    "cuDriverGetVersion": ("cuDriverGetVersion", (_NUMBER,)),
    "cuGetErrorName": ("cuGetErrorName", (_Int, _TEXT)),
    "cuDeviceGetCount": ("cuDeviceGetCount", (_NUMBER,)),
    "cuDeviceGet": ("cuDeviceGet", (_NUMBER, _Int)),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", (_NUMBER, _Int, _Int)),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", (_HANDLE, _Int)),
    "cuDevicePrimaryCtxRelease": ("cuDevicePrimaryCtxRelease_v2", (_Int,)),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", (_Pointer,)),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", (_Pointer,)),
    "cuCtxSynchronize": ("cuCtxSynchronize", ()),
    "cuMemGetInfo": ("cuMemGetInfo_v2", (_BYTES, _BYTES)),
    "cuMemAlloc": ("cuMemAlloc_v2", (_HANDLE, _Size)),
    "cuMemFree": ("cuMemFree_v2", (_Pointer,)),
    "cuMemAllocAsync": ("cuMemAllocAsync", (_HANDLE, _Size, _Pointer)),
    "cuMemFreeAsync": ("cuMemFreeAsync", (_Pointer, _Pointer)),
    "cuMemAddressReserve": ("cuMemAddressReserve", (_HANDLE, _Size, _Size, _Address, ctypes.c_ulonglong)),
    "cuMemAddressFree": ("cuMemAddressFree", (_Address, _Size)),
    "cuMemCreate": ("cuMemCreate", (_HANDLE, _Size, "AllocationProp", ctypes.c_ulonglong)),
    "cuMemRelease": ("cuMemRelease", (_Address,)),
    "cuMemMap": ("cuMemMap", (_Address, _Size, _Size, _Address, ctypes.c_ulonglong)),
    "cuMemUnmap": ("cuMemUnmap", (_Address, _Size)),
    "cuMemSetAccess": ("cuMemSetAccess", (_Address, _Size, "AccessDesc", _Size)),
    "cuMemExportToShareableHandle": ("cuMemExportToShareableHandle", (_NUMBER, _Address, _Int, ctypes.c_ulonglong)),
    "cuMemImportFromShareableHandle": ("cuMemImportFromShareableHandle", (_HANDLE, _Pointer, _Int)),
    "cuMemcpyPeerAsync": ("cuMemcpyPeerAsync", (_Address, _Pointer, _Address, _Pointer, _Size, _Pointer)),
    "cuIpcCloseMemHandle": ("cuIpcCloseMemHandle", (_Pointer,)),
    "cuPointerGetAttribute": ("cuPointerGetAttribute", (_NUMBER, _Int, _Address)),
    "cuCtxEnablePeerAccess": ("cuCtxEnablePeerAccess", (_Pointer, _Unsigned)),
    "cuMemHostAlloc": ("cuMemHostAlloc", (_HANDLE, _Size, _Unsigned)),
    "cuMemHostRegister": ("cuMemHostRegister_v2", (_Pointer, _Size, _Unsigned)),
    "cuMemHostUnregister": ("cuMemHostUnregister", (_Pointer,)),
    "cuMemFreeHost": ("cuMemFreeHost", (_Pointer,)),
    "cuMemcpyHtoD": ("cuMemcpyHtoD_v2", (_Pointer, _Pointer, _Size)),
    "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", (_Pointer, _Pointer, _Size, _Pointer)),
    "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", (_Pointer, _Pointer, _Size, _Pointer)),
    "cuMemcpyDtoDAsync": ("cuMemcpyDtoDAsync_v2", (_Pointer, _Pointer, _Size, _Pointer)),
    "cuMemcpy3DAsync": ("cuMemcpy3DAsync_v2", ("Memcpy3D", _Pointer)),
    "cuMemsetD8Async": ("cuMemsetD8Async", (_Pointer, _Byte, _Size, _Pointer)),
    "cuMemsetD16Async": ("cuMemsetD16Async", (_Pointer, ctypes.c_ushort, _Size, _Pointer)),
    "cuMemsetD32Async": ("cuMemsetD32Async", (_Pointer, _Unsigned, _Size, _Pointer)),
    "cuMemsetD2D8Async": ("cuMemsetD2D8Async", (_Pointer, _Size, _Byte, _Size, _Size, _Pointer)),
    "cuMemsetD2D16Async": ("cuMemsetD2D16Async", (_Pointer, _Size, ctypes.c_ushort, _Size, _Size, _Pointer)),
    "cuMemsetD2D32Async": ("cuMemsetD2D32Async", (_Pointer, _Size, _Unsigned, _Size, _Size, _Pointer)),
    "cuStreamCreate": ("cuStreamCreate", (_HANDLE, _Unsigned)),
    "cuStreamDestroy": ("cuStreamDestroy_v2", (_Pointer,)),
    "cuStreamSynchronize": ("cuStreamSynchronize", (_Pointer,)),
    "cuStreamQuery": ("cuStreamQuery", (_Pointer,)),
    "cuStreamWaitEvent": ("cuStreamWaitEvent", (_Pointer, _Pointer, _Unsigned)),
    "cuStreamIsCapturing": ("cuStreamIsCapturing", (_Pointer, _NUMBER)),
    "cuEventCreate": ("cuEventCreate", (_HANDLE, _Unsigned)),
    "cuEventDestroy": ("cuEventDestroy_v2", (_Pointer,)),
    "cuEventRecord": ("cuEventRecord", (_Pointer, _Pointer)),
    "cuEventSynchronize": ("cuEventSynchronize", (_Pointer,)),
    "cuEventElapsedTime": ("cuEventElapsedTime", (_MILLISECONDS, _Pointer, _Pointer)),
    "cuModuleLoadData": ("cuModuleLoadData", (_HANDLE, _Pointer)),
    "cuModuleUnload": ("cuModuleUnload", (_Pointer,)),
    "cuModuleGetFunction": ("cuModuleGetFunction", (_HANDLE, _Pointer, ctypes.c_char_p)),
    "cuModuleGetGlobal": ("cuModuleGetGlobal_v2", (_HANDLE, _BYTES, _Pointer, ctypes.c_char_p)),
    "cuFuncSetAttribute": ("cuFuncSetAttribute", (_Pointer, _Int, _Int)),
    "cuFuncGetParamInfo": ("cuFuncGetParamInfo", (_Pointer, _Size, _BYTES, _BYTES)),
    "cuOccupancyMaxActiveBlocks": ("cuOccupancyMaxActiveBlocksPerMultiprocessor", (_NUMBER, _Pointer, _Int, _Size)),
    "cuLaunchKernelEx": ("cuLaunchKernelEx", ("LaunchConfig", _Pointer, _Pointer, _Pointer)),
    "cuGraphCreate": ("cuGraphCreate", (_HANDLE, _Unsigned)),
    "cuGraphClone": ("cuGraphClone", (_HANDLE, _Pointer)),
    "cuGraphDestroy": ("cuGraphDestroy", (_Pointer,)),
    "cuGraphDestroyNode": ("cuGraphDestroyNode", (_Pointer,)),
    "cuGraphNodeFindInClone": ("cuGraphNodeFindInClone", (_HANDLE, _Pointer, _Pointer)),
    "cuGraphAddKernelNode": ("cuGraphAddKernelNode_v2", (_HANDLE, _Pointer, _Pointer, _Size, "KernelNodeParams")),
    "cuGraphAddMemsetNode": ("cuGraphAddMemsetNode", (_HANDLE, _Pointer, _Pointer, _Size, "MemsetNodeParams", _Pointer)),
    "cuGraphAddMemcpyNode": ("cuGraphAddMemcpyNode", (_HANDLE, _Pointer, _Pointer, _Size, "Memcpy3D", _Pointer)),
    "cuGraphAddEmptyNode": ("cuGraphAddEmptyNode", (_HANDLE, _Pointer, _Pointer, _Size)),
    "cuGraphAddConditionalNode": ("cuGraphAddNode", (_HANDLE, _Pointer, _Pointer, _Size, "ConditionalNodeParams")),
    "cuGraphConditionalHandleCreate": ("cuGraphConditionalHandleCreate", (_HANDLE, _Pointer, _Pointer, _Unsigned, _Unsigned)),
    "cuGraphKernelNodeSetAttribute": ("cuGraphKernelNodeSetAttribute", (_Pointer, _Int, "LaunchAttributeValue")),
    "cuGraphExecKernelNodeSetParams": ("cuGraphExecKernelNodeSetParams_v2", (_Pointer, _Pointer, "KernelNodeParams")),
    "cuGraphExecMemcpyNodeSetParams": ("cuGraphExecMemcpyNodeSetParams", (_Pointer, _Pointer, "Memcpy3D", _Pointer)),
    "cuGraphNodeSetEnabled": ("cuGraphNodeSetEnabled", (_Pointer, _Pointer, _Unsigned)),
    "cuGraphInstantiate": ("cuGraphInstantiateWithFlags", (_HANDLE, _Pointer, ctypes.c_ulonglong)),
    "cuGraphExecDestroy": ("cuGraphExecDestroy", (_Pointer,)),
    "cuGraphUpload": ("cuGraphUpload", (_Pointer, _Pointer)),
    "cuGraphLaunch": ("cuGraphLaunch", (_Pointer, _Pointer)),
}
"""Functions as declared in cuda.h: symbol and parameters; a structure's name means a pointer to it."""

ANSWERING = (
    "cuDeviceGetName",
    "cuIpcOpenMemHandle",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamGetCaptureInfo",
    "cuGraphAddChildGraphNode",
)
"""Other functions that return more than their error."""


def answers(name: str) -> bool:
    return name in ANSWERING if name not in FUNCTIONS else any(isinstance(kind, _Out) for kind in FUNCTIONS[name][1])


class Driver:
    """The driver's functions. The first call raises OSError without the library; a missing function raises driver-too-old."""

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        symbol, parameters = FUNCTIONS[name]
        function = self._function(symbol, parameters)
        call = _answering(function, parameters) if answers(name) else function
        setattr(self, name, call)  # later accesses do not call `__getattr__`
        return call

    def _function(self, symbol: str, parameters: Sequence[Any]) -> Any:
        library = self.__dict__.get("_library")
        if library is None:
            library = self._library = _opened()
        try:
            function = library[symbol]
        except AttributeError:
            text = f"the CUDA driver of this machine has no {symbol}, which the bundle needs"
            raise MachineError("driver-too-old", text, "upgrade the NVIDIA driver") from None
        function.argtypes = [_declared(kind) for kind in parameters]
        return function

    def held(self, name: str) -> Callable[..., int]:
        """A function without results that keeps the interpreter's lock, for calls that return at once."""
        symbol, parameters = FUNCTIONS[name]
        function = ctypes.PyDLL(LIBRARY)[symbol]
        function.argtypes = list(parameters)
        return function

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:
        text = ctypes.create_string_buffer(size)
        return self._function("cuDeviceGetName", (_Pointer, _Int, _Int))(text, size, device), text.raw

    def cuIpcOpenMemHandle(self, handle: bytes, flags: int) -> tuple[int, int]:
        """The address of another process's memory, by its handle of 64 bytes."""
        from .structures import IpcMemHandle

        address = _Address()
        function = self._function("cuIpcOpenMemHandle_v2", (_Pointer, IpcMemHandle, _Unsigned))
        return function(byref(address), IpcMemHandle.from_buffer_copy(handle), flags), address.value

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        """Returns the previous mode."""
        value = _Int(mode)
        return self._function("cuThreadExchangeStreamCaptureMode", (POINTER(_Int),))(value), value.value

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, int, list[int]]:
        """The graph that is being captured on the stream, and the current dependencies."""
        status, number, graph, count = _Int(), ctypes.c_uint64(), _Address(), _Size()
        nodes, edges = POINTER(_Address)(), _Pointer()
        places = [byref(answer) for answer in (status, number, graph, nodes, edges, count)]
        error = self._function("cuStreamGetCaptureInfo_v3", (_Pointer,) * 7)(stream, *places)
        return error, graph.value, nodes[: count.value] if count.value else []

    def cuStreamUpdateCaptureDependencies(self, stream: int, nodes: Sequence[int], flags: int) -> int:
        """Replaces the dependencies of the next operation."""
        function = self._function("cuStreamUpdateCaptureDependencies", (_Pointer, _Pointer, _Size, _Unsigned))
        return int(function(stream, _handles(nodes), len(nodes), flags))

    def cuGraphAddChildGraphNode(self, graph: int, after: Sequence[int], child: int) -> tuple[int, int]:
        node = _Address()
        function = self._function("cuGraphAddChildGraphNode", (_Pointer, _Pointer, _Pointer, _Size, _Pointer))
        return function(byref(node), graph, _handles(after), len(after), child), node.value

    def cuGraphAddDependencies(
        self, graph: int, sources: Sequence[int], targets: Sequence[int], data: Sequence[EdgeData] | None
    ) -> int:
        """Adds edges; old drivers do not know `data`."""
        ends, count = (_handles(sources), _handles(targets)), len(sources)
        if data is None:
            function = self._function("cuGraphAddDependencies", (_Pointer, _Pointer, _Pointer, _Size))
            return int(function(graph, *ends, count))
        function = self._function("cuGraphAddDependencies_v2", (_Pointer, _Pointer, _Pointer, _Pointer, _Size))
        return int(function(graph, *ends, (type(data[0]) * count)(*data), count))


def _declared(kind: Any) -> Any:
    if isinstance(kind, str):
        from . import structures  # not needed before there is a context

        return POINTER(getattr(structures, kind))
    return _Pointer if isinstance(kind, _Out) else kind


def _opened() -> ctypes.CDLL:
    ctypes.CDLL(None).dlopen(LIBRARY.encode(), _RTLD_NOW)  # releases the interpreter's lock, which CDLL(...) keeps
    return ctypes.CDLL(LIBRARY)


def _handles(values: Sequence[int]) -> ctypes.Array[Any]:
    return (_Address * len(values))(*values)


def _answering(function: Any, parameters: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    """`function` without its output parameters; returns the error and the results."""
    kinds: list[Any] = [parameter.kind if isinstance(parameter, _Out) else None for parameter in parameters]

    def call(*arguments: Any) -> tuple[Any, ...]:
        rest, answers = iter(arguments), [kind and kind() for kind in kinds]
        error = function(*[next(rest) if answer is None else byref(answer) for answer in answers])
        return (error, *[answer.value for answer in answers if answer is not None])

    return call
