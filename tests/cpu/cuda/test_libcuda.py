"""Tests the runtime's binding of the CUDA driver with a fake driver, which is compiled with the real cuda.h and logs its arguments.

That it compiles shows that symbols and parameters match cuda.h. Its log shows that the binding passes its arguments correctly.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cgbundle.cuda import driver, graph_executor, kernels, libcuda, stream_executor, structures
from cgbundle.errors import MachineError
from cgbundle.format.table import Table
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import KernelNode
from cgcompile.targets.requirements import compiler
from tests.helpers.bundles import cuda_bundles

A, B, C, D = 0xA << 40, 0xB << 40, 0xC << 40, 0xD << 40
"""Handles and addresses."""

SIZE, NEW = 5 << 33, 0xABCD << 32
"""More bytes than an int can hold; the handle that every call of the fake driver creates."""

RECORDS = (
    structures.KernelNodeParams, structures.MemsetNodeParams, structures.Memcpy3D, structures.LaunchAttributeValue,
    structures.LaunchAttribute, structures.LaunchConfig, structures.EdgeData, structures.ConditionalNodeParams,
    structures.AllocationProp, structures.AccessDesc, structures.IpcMemHandle,
)  # fmt: skip

NODES = [0x10D << 36, 0x10E << 36]
"""Nodes that the fake driver's capture depends on."""

ALLOCATION = structures.AllocationProp(type=1, requestedHandleTypes=1, location=structures.MemLocation(1, 2))
ACCESS = structures.AccessDesc(location=structures.MemLocation(1, 2), flags=3)
"""Memory of device 2 that is exported as a file descriptor, with read and write access for this device."""

CALLS: tuple[tuple[str, tuple[Any, ...], str, Any], ...] = (
    ("cuInit", (0,), "", 0),
    ("cuDriverGetVersion", (), "", (0, 12040)),
    ("cuGetErrorName", (719,), "", (0, b"CUDA_ERROR_LAUNCH_FAILED")),
    ("cuGetErrorName", (7,), "", (1, None)),
    ("cuDeviceGetCount", (), "", (0, 3)),
    ("cuDeviceGet", (2,), "", (0, 7)),
    ("cuDeviceGetName", (8, 7), "8 7", (0, b"a GPU\0\0\0")),
    ("cuDeviceGetAttribute", (libcuda.COMPUTE_CAPABILITY_MAJOR, 7), "", (0, 97)),
    ("cuDeviceGetAttribute", (libcuda.COMPUTE_CAPABILITY_MINOR, 7), "", (0, 11)),
    ("cuDevicePrimaryCtxRetain", (7,), "7", (0, NEW)),
    ("cuDevicePrimaryCtxRelease", (7,), "7", 0),
    ("cuCtxPushCurrent", (A,), "a0000000000", 0),
    ("cuCtxPopCurrent", (None,), "0", 0),
    ("cuCtxSynchronize", (), "-", 0),
    ("cuMemGetInfo", (), "", (0, 5 << 33, 9 << 33)),
    ("cuMemAlloc", (SIZE,), "a00000000", (0, NEW)),
    ("cuMemFree", (A,), "a0000000000", 0),
    ("cuMemAllocAsync", (SIZE, A), "a00000000 a0000000000", (0, NEW)),
    ("cuMemFreeAsync", (A, B), "a0000000000 b0000000000", 0),
    ("cuMemAddressReserve", (SIZE, 7, A, 0), "a00000000 7 a0000000000 0", (0, NEW)),
    ("cuMemAddressFree", (A, SIZE), "a0000000000 a00000000", 0),
    ("cuMemCreate", (SIZE, ALLOCATION, 0), "a00000000 1 1 1 2 0", (0, NEW)),
    ("cuMemRelease", (A,), "a0000000000", 0),
    ("cuMemMap", (A, SIZE, 3, B, 0), "a0000000000 a00000000 3 b0000000000 0", 0),
    ("cuMemUnmap", (A, SIZE), "a0000000000 a00000000", 0),
    ("cuMemSetAccess", (A, SIZE, ACCESS, 1), "a0000000000 a00000000 1 2 1 1", 0),
    ("cuMemExportToShareableHandle", (A, 1, 0), "a0000000000 1 0", (0, 33)),
    ("cuMemImportFromShareableHandle", (33, 1), "21 1", (0, NEW)),
    ("cuIpcOpenMemHandle", (b"a handle" + bytes(56), 1), "a handle 1", (0, NEW)),
    ("cuIpcCloseMemHandle", (A,), "a0000000000", 0),
    ("cuMemcpyPeerAsync", (A, B, C, D, SIZE, 0), "a0000000000 b0000000000 c0000000000 d0000000000 a00000000 0", 0),
    ("cuCtxEnablePeerAccess", (A, 0), "a0000000000 0", 0),
    ("cuPointerGetAttribute", (libcuda.POINTER_MEMORY_TYPE, A), "1 a0000000000", (0, libcuda.MEMORY_TYPE_HOST)),
    ("cuMemHostAlloc", (SIZE, 1), "a00000000 1", (0, NEW)),
    ("cuMemHostRegister", (A, 77, 0), "a0000000000 77 0", 0),
    ("cuMemHostUnregister", (A,), "a0000000000", 0),
    ("cuMemFreeHost", (A,), "a0000000000", 0),
    ("cuMemcpyHtoD", (A, b"bytes", 5), "a0000000000 bytes 5", 0),
    ("cuMemcpyHtoDAsync", (A, B, SIZE, C), "a0000000000 b0000000000 a00000000 c0000000000", 0),
    ("cuMemcpyDtoHAsync", (A, B, SIZE, C), "a0000000000 b0000000000 a00000000 c0000000000", 0),
    ("cuMemcpyDtoDAsync", (A, B, SIZE, 0), "a0000000000 b0000000000 a00000000 0", 0),
    ("cuMemsetD8Async", (A, 0xFE, SIZE, B), "a0000000000 fe a00000000 b0000000000", 0),
    ("cuMemsetD16Async", (A, 0xFEED, SIZE, B), "a0000000000 feed a00000000 b0000000000", 0),
    ("cuMemsetD32Async", (A, 0xFEEDBEEF, SIZE, B), "a0000000000 feedbeef a00000000 b0000000000", 0),
    ("cuMemsetD2D8Async", (A, SIZE, 0xFE, 3, SIZE, B), "a0000000000 a00000000 fe 3 a00000000 b0000000000", 0),
    ("cuMemsetD2D16Async", (A, SIZE, 0xFEED, 3, SIZE, B), "a0000000000 a00000000 feed 3 a00000000 b0000000000", 0),
    ("cuMemsetD2D32Async", (A, SIZE, 0xFEEDBEEF, 3, SIZE, B), "a0000000000 a00000000 feedbeef 3 a00000000 b0000000000", 0),
    ("cuStreamCreate", (libcuda.STREAM_NON_BLOCKING,), "1", (0, NEW)),
    ("cuStreamDestroy", (A,), "a0000000000", 0),
    ("cuStreamSynchronize", (A,), "a0000000000", 0),
    ("cuStreamQuery", (A,), "a0000000000", 0),
    ("cuStreamWaitEvent", (A, B, 0), "a0000000000 b0000000000 0", 0),
    ("cuStreamIsCapturing", (A,), "a0000000000", (0, 1)),
    ("cuThreadExchangeStreamCaptureMode", (libcuda.CAPTURE_MODE_RELAXED,), "1", (0, 1)),
    ("cuStreamGetCaptureInfo", (A,), "a0000000000", (0, NEW, NODES)),
    (
        "cuStreamUpdateCaptureDependencies", (A, [B, C], libcuda.SET_CAPTURE_DEPENDENCIES),
        "a0000000000 b0000000000 c0000000000 2 1", 0,
    ),
    ("cuEventCreate", (libcuda.EVENT_DEFAULT,), "10", (0, NEW)),
    ("cuEventCreate", (libcuda.EVENT_DISABLE_TIMING,), "01", (0, NEW)),
    ("cuEventDestroy", (A,), "a0000000000", 0),
    ("cuEventRecord", (A, B), "a0000000000 b0000000000", 0),
    ("cuEventSynchronize", (A,), "a0000000000", 0),
    ("cuEventElapsedTime", (A, B), "a0000000000 b0000000000", (0, 2.5)),
    ("cuModuleLoadData", (b"an image",), "an image", (0, NEW)),
    ("cuModuleUnload", (A,), "a0000000000", 0),
    ("cuModuleGetFunction", (A, b"name"), "a0000000000 name", (0, NEW)),
    ("cuModuleGetGlobal", (A, b"name"), "a0000000000 name", (0, NEW, 3 << 33)),
    ("cuFuncSetAttribute", (A, 8, -1), "a0000000000 8 -1", 0),
    ("cuFuncGetParamInfo", (A, 2), "a0000000000 2", (0, 8, 3 << 33)),
    ("cuOccupancyMaxActiveBlocks", (A, 128, SIZE), "a0000000000 128 a00000000", (0, 6)),
    ("cuGraphCreate", (0,), "0", (0, NEW)),
    ("cuGraphDestroy", (A,), "a0000000000", 0),
    ("cuGraphClone", (A,), "a0000000000", (0, NEW)),
    ("cuGraphNodeFindInClone", (A, B), "a0000000000 b0000000000", (0, NEW)),
    ("cuGraphDestroyNode", (A,), "a0000000000", 0),
    ("cuGraphNodeSetEnabled", (A, B, True), "a0000000000 b0000000000 1", 0),
    ("cuGraphAddEmptyNode", (A, None, 0), "a0000000000 0 0", (0, NEW)),
    ("cuGraphAddChildGraphNode", (A, [B, C], D), "a0000000000 b0000000000 c0000000000 2 d0000000000", (0, NEW)),
    ("cuGraphConditionalHandleCreate", (A, B, 1, 2), "a0000000000 b0000000000 1 2", (0, NEW)),
    ("cuGraphAddDependencies", (A, [B, C], [C, D], None), "a0000000000 b0000000000 c0000000000 d0000000000 2", 0),
    (
        "cuGraphAddDependencies", (A, [B, C], [C, D], [structures.EdgeData(), structures.EdgeData(from_port=1, to_port=2, type=3)]),
        "a0000000000 c0000000000 d0000000000 1,2,3 2", 0,
    ),
    ("cuGraphInstantiate", (A, libcuda.INSTANTIATE_USE_NODE_PRIORITY), "a0000000000 1", (0, NEW)),
    ("cuGraphExecDestroy", (A,), "a0000000000", 0),
    ("cuGraphUpload", (A, B), "a0000000000 b0000000000", 0),
    ("cuGraphLaunch", (A, 0), "a0000000000 0", 0),
)  # fmt: skip
"""(function, arguments, logged arguments, result)."""

BY_RECORD = {
    "cuMemcpy3DAsync", "cuLaunchKernelEx", "cuGraphAddKernelNode", "cuGraphAddMemsetNode", "cuGraphAddMemcpyNode",
    "cuGraphAddConditionalNode", "cuGraphKernelNodeSetAttribute", "cuGraphExecKernelNodeSetParams",
    "cuGraphExecMemcpyNodeSetParams",
}  # fmt: skip
"""Functions that take a struct; the tests of executors call them."""


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles the fake driver to a shared object."""
    spec = find_spec("triton")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        pytest.skip("triton, which brings cuda.h, is not installed")
    library = tmp_path_factory.mktemp("double") / "double.so"
    source, header = Path(__file__).with_name("driver_double.c"), Path(places[0]) / "backends/nvidia/include"
    options = ("-x", "c", "-shared", "-fPIC", "-Wall", "-Wmissing-prototypes", "-Werror", "-I", str(header))
    subprocess.run([compiler(), *options, "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def cu(double: Path, monkeypatch: pytest.MonkeyPatch) -> libcuda.Driver:
    """Replaces the driver of the executors by the binding over the fake driver."""
    monkeypatch.setattr(libcuda, "LIBRARY", str(double))
    binding = libcuda.Driver()
    for module in (driver, graph_executor, stream_executor):
        monkeypatch.setattr(module, "cu", binding)
    return binding


@pytest.fixture
def log(double: Path, cu: libcuda.Driver) -> Callable[[], str]:
    """Returns a function that gives the fake driver's log since its last call."""
    take = ctypes.CDLL(str(double)).take
    take.restype = ctypes.c_char_p
    take()
    return lambda: take().decode()


@pytest.mark.parametrize(("name", "arguments", "arrives", "answer"), CALLS, ids=[call[0] for call in CALLS])
def test_every_call_arrives(
    name: str, arguments: tuple[Any, ...], arrives: str, answer: Any, cu: libcuda.Driver, log: Callable[[], str]
) -> None:
    result = getattr(cu, name)(*arguments)
    assert (log(), result) == (arrives, answer)
    assert isinstance(result, tuple) == libcuda.answers(name)


def test_every_function_is_called_here() -> None:
    methods = {name for name in vars(libcuda.Driver) if name.startswith("cu")}
    assert {*libcuda.FUNCTIONS, *methods} == {call[0] for call in CALLS} | BY_RECORD


def test_the_records_are_as_long_as_the_drivers(double: Path) -> None:
    sizes = (ctypes.c_size_t * len(RECORDS)).in_dll(ctypes.CDLL(str(double)), "sizes")
    assert list(sizes) == [ctypes.sizeof(record) for record in RECORDS]


def test_an_error_has_its_name(cu: libcuda.Driver) -> None:
    with pytest.raises(MachineError, match=r"cuX \(there\): CUDA_ERROR_LAUNCH_FAILED"):
        driver.check("cuX", 719, "there")
    with pytest.raises(MachineError, match="cuX: error 7"):
        driver.check("cuX", (7, 1))


# --- records ---------------------------------------------------------------------------------------------------------

BASES = (1 << 40, 2 << 40, 3 << 40, 4 << 40, 0)
ATTRIBUTES = ((2, (1, 0, 0)), (4, (2, 3, 4)), (8, (-5, 0, 0)), (9, (0, 1, 0)), (14, (2**32 - 1, 0, 0)))
ARRIVED = "[2:1] [4:2,3,4] [8:-5] [9:0,1] [14:4294967295]"


@pytest.fixture
def table() -> Table:
    recording = cuda_bundles.recording("ab" * 32, 4)
    combine = recording.nodes[0]
    assert isinstance(combine, KernelNode)
    return Table(tables.encode(replace(recording, nodes=(replace(combine, attributes=ATTRIBUTES), *recording.nodes[1:]))))


@pytest.fixture
def handles() -> kernels.Launches:
    stub = kernels.Launches.__new__(kernels.Launches)
    stub.functions, stub.params = [A, B], [C, D]
    return stub


def test_a_kernel_launch_arrives(table: Table, handles: kernels.Launches, cu: libcuda.Driver, log: Callable[[], str]) -> None:
    for row, address, stream, rest in ((0, C, 7, f" {ARRIVED}"), (1, D, 0, "")):
        stream_executor._kernel_step(table, row, handles, "")(stream)
        function, grid, threads = handles.functions[table.function[row]], table.grid_x[row], table.threads_x[row]
        assert log() == f"{grid},1,1 {threads},1,1 0 {stream:x} {function:x} {address:x} 0{rest}"


def test_a_kernel_node_arrives(table: Table, handles: kernels.Launches, cu: libcuda.Driver, log: Callable[[], str]) -> None:
    params = graph_executor._kernel_params(table, handles)
    for row, address in ((0, C), (1, D)):
        assert cu.cuGraphAddKernelNode(A, None, 0, params(row)) == (0, NEW)
        grid, threads = table.grid_x[row], table.threads_x[row]
        function = handles.functions[table.function[row]]
        assert log() == f"{A:x} 0 0 {function:x} {grid},1,1 {threads},1,1 0 {address:x} 0 0 0"
        assert cu.cuGraphExecKernelNodeSetParams(C, D, params(row)) == 0
        assert log() == f"{C:x} {D:x} {function:x} {grid},1,1 {threads},1,1 0 {address:x} 0"
    for number, value in kernels.attributes(table, 0):
        assert cu.cuGraphKernelNodeSetAttribute(B, number, value) == 0
    assert log() == "".join(f"{B:x} {attribute}" for attribute in ARRIVED.split(" "))


def test_copies_and_fills_arrive(table: Table, cu: libcuda.Driver, log: Callable[[], str]) -> None:
    source, target = (4 << 40) + table.memcpy_offset[0], (4 << 40) + table.memcpy_offset[1]
    assert source != target
    copied = f"2 2 {source:x} {target:x} 40 4 1 40 {table.memcpy_pitch[1]:x} 40 {table.memcpy_pitch[3]:x}"
    params = kernels.copy_params(table, 0, BASES)
    assert (cu.cuGraphAddMemcpyNode(A, None, 0, params, B), log()) == ((0, NEW), f"{copied} {A:x} 0 0 {B:x}")
    assert (cu.cuMemcpy3DAsync(params, 7), log()) == (0, f"{copied} 7")
    assert (cu.cuGraphExecMemcpyNodeSetParams(A, B, params, C), log()) == (0, f"{copied} {A:x} {B:x} {C:x}")
    fill = graph_executor._memset_params(table, 0, BASES)
    value = kernels.memset_value(table, 0)
    assert cu.cuGraphAddMemsetNode(A, None, 0, fill, B) == (0, NEW)
    assert log() == f"{A:x} 0 0 {4 << 40:x} {fill.pitch:x} {value:x} {fill.elementSize:x} {fill.width:x} {fill.height:x} {B:x}"


@pytest.mark.parametrize("loop", [False, True])
def test_a_conditional_node_arrives(loop: bool, cu: libcuda.Driver, log: Callable[[], str]) -> None:
    params = structures.ConditionalNodeParams(type=libcuda.NODE_TYPE_CONDITIONAL)
    params.conditional.handle, params.conditional.size, params.conditional.ctx = C, 2, D
    params.conditional.type = libcuda.CONDITION_WHILE if loop else libcuda.CONDITION_IF
    assert cu.cuGraphAddConditionalNode(A, None, 0, params) == (0, NEW)
    assert log() == f"{A:x} 0 0 1 {C:x} {'01' if loop else '10'} 2 {D:x}"
    assert params.conditional.phGraph_out[:2] == [0xB0D1 << 32, 0xB0D2 << 32]


PYTHON_API = 4
"""FUNCFLAG_PYTHONAPI of ctypes: the call keeps the GIL."""


def test_a_function_that_keeps_the_lock_is_the_same(cu: libcuda.Driver, log: Callable[[], str]) -> None:
    send = cu.held("cuMemcpyHtoDAsync")
    assert (send(A, B, 0x77, 7), log()) == (0, f"{A:x} {B:x} 77 7")
    assert type(send)._flags_ & PYTHON_API and not type(cu.cuStreamQuery)._flags_ & PYTHON_API
