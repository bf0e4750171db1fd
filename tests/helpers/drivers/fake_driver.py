"""A fake CUDA driver. GPU memory is host memory, kernels are Python functions, and graphs run in an order that their edges allow.

It checks what the real driver checks: double frees, unknown handles, a context that is not current. It counts live objects and can
fail at any call, so tests reach every error path of the backend without a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from array import array
from functools import partial
from struct import unpack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cgbundle.cuda import driver, graph_executor, kernels, lanes, memory, stream_executor, upload
from cgbundle.cuda.libcuda import Driver, answers
from cgbundle.cuda.structures import Memcpy3D
from cgbundle.format.table import SET_CONDITION
from cgbundle.gpu import backend, fast_path, host_steps, programs, streams, threaded_copies, update
from cgbundle.program import exchanging, ranks
from tests.helpers.bundles.cuda_bundles import ADD, COMBINE

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SYMBOLS = {"bias": 4, "table": 8}
FLAT = {"cuMemsetD8Async": 1, "cuMemsetD16Async": 2, "cuMemsetD32Async": 4}


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver | Driver) -> None:
    """Replaces the driver in all modules of the runtime."""
    of_cuda = (driver, graph_executor, memory, kernels, stream_executor, lanes, upload)
    of_gpu = (backend, fast_path, host_steps, programs, streams, threaded_copies, update)
    of_ranks = (ranks, exchanging)
    for module in (*of_cuda, *of_gpu, *of_ranks):
        monkeypatch.setattr(module, "cu", fake)


class Handle(int):
    """A driver handle."""


class FakeDriver:
    """Replaces `libcuda.Driver`. The call with number `fail_at` returns `error` instead of running."""

    def __init__(self, arch: tuple[int, int] = (9, 0), version: int = 13000, devices: int = 1) -> None:
        self.arch, self.version, self.devices = arch, version, devices
        self.fail_at, self.error = -1, 719
        self.calls: list[str] = []
        self.live: dict[int, Any] = {}
        self.functions: dict[int, Any] = {}
        self.pinned: dict[int, int] = {}  # size in bytes by address of host memory
        self.capturing: set[int] = set()  # streams
        self.captured: list[Callable[[], object]] = []  # work enqueued on captured streams
        self.captures: dict[int, int] = {}  # the graph that a capture writes to, by stream
        self.conditions: dict[int, int] = {}  # value by conditional handle
        self.disabled: set[tuple[int, int]] = set()  # nodes of executable graphs
        self.refused: set[int] = set()  # addresses that cuGraphExecMemcpyNodeSetParams rejects
        self.retained = 0
        self.freed = 0
        self._numbers = itertools.count(0x1000)
        self._current = threading.local()
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any) -> int | tuple[Any, ...]:
            with self._lock:
                self.calls.append(name)
                if len(self.calls) - 1 == self.fail_at:
                    return (self.error,) if answers(name) else self.error
                if name.startswith(("cuMem", "cuGraph", "cuLaunch", "cuModule", "cuStream", "cuEvent", "cuFunc")):
                    assert getattr(self._current, "stack", []), f"{name} without a current context"
                run = partial(self._memset, name) if name in FLAT else getattr(self, f"do_{name}")
                answer = run(*args)
                assert answer is not None or not answers(name), name
                return (0, answer) if answers(name) and not isinstance(answer, tuple) else answer or 0

        call.__name__ = name
        return call

    def _make(self, item: Any) -> Handle:
        handle = Handle(next(self._numbers))
        self.live[handle] = item
        return handle

    def _drop(self, handle: int) -> None:
        del self.live[int(handle)]

    # --- context ----------------------------------------------------------------------------------------------

    def do_cuInit(self, flags: int) -> int:
        return 0 if self.devices else 100

    def do_cuGetErrorName(self, error: int) -> Any:
        return {2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE"}.get(error, b"CUDA_ERROR_LAUNCH_FAILED")

    def do_cuDeviceGetCount(self) -> int:
        return self.devices

    def do_cuDriverGetVersion(self) -> int:
        return self.version

    def do_cuDeviceGet(self, index: int) -> int:
        return index

    def do_cuDeviceGetName(self, size: int, device: int) -> bytes:
        return b"Fake GPU" + bytes(size - 8)

    def do_cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        return self.arch[attribute - 75]

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> Handle:
        self.retained += 1
        return Handle(7)

    def do_cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.retained -= 1

    def do_cuCtxPushCurrent(self, context: int) -> None:
        assert self.retained, "the context is gone"
        self._current.stack = [*getattr(self._current, "stack", []), context]

    def do_cuCtxPopCurrent(self, context: None) -> None:
        self._current.stack.pop()

    def do_cuCtxSynchronize(self) -> None:
        pass

    # --- memory -----------------------------------------------------------------------------------------------

    def do_cuMemAlloc(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(b"\xcd" * size, size + 256)
        address = ctypes.addressof(buffer)
        self.live[address] = buffer
        return address

    def do_cuMemHostAlloc(self, size: int, flags: int) -> int:
        address = self.do_cuMemAlloc(size)
        self.pinned[address] = size
        return address

    def held(self, name: str) -> Any:
        return getattr(self, name)

    def do_cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        assert not address % (2 << 20) and not flags
        self.live[address] = "registered"
        self.pinned[address] = size

    def do_cuMemHostUnregister(self, address: int) -> None:
        del self.pinned[address]
        self._drop(address)

    def do_cuMemAllocAsync(self, size: int, stream: int) -> int:
        return self.do_cuMemAlloc(size)

    def do_cuMemFree(self, address: int) -> None:
        assert address not in self.pinned
        self._drop(address)

    def do_cuIpcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        """Maps the memory of another process; the handle holds its address and its size in bytes."""
        assert len(handle) == 64 and flags == 1
        address, size = unpack("<QQ", handle[:16])
        self.live[address] = (ctypes.c_char * size).from_address(address)
        return int(address)

    def do_cuIpcCloseMemHandle(self, address: int) -> None:
        self._drop(address)

    def do_cuMemFreeHost(self, address: int) -> None:
        del self.pinned[address]
        self._drop(address)

    def do_cuMemFreeAsync(self, address: int, stream: int) -> None:
        self._drop(address)

    def do_cuMemGetInfo(self) -> tuple[int, int, int]:
        return (0, 1 << 30, 2 << 30)

    def _enqueue(self, stream: int, run: Callable[[], object]) -> None:
        if int(stream) in self.capturing:
            self.captured.append(run)
        else:
            run()

    def _memset(self, name: str, address: int, value: int, count: int, stream: int) -> None:
        data = value.to_bytes(FLAT[name], "little") * count
        self._enqueue(stream, lambda: ctypes.memmove(address, data, len(data)))

    def on_device(self, address: int) -> bool:
        """Returns whether an address is in allocated GPU memory."""
        places = [(start, len(item)) for start, item in self.live.items() if isinstance(item, ctypes.Array)]
        return any(start <= address < start + size for start, size in places if start not in self.pinned)

    def is_pinned(self, address: int) -> bool:
        """Returns whether an address is in pinned host memory."""
        return any(start <= address < start + size for start, size in self.pinned.items())

    def do_cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int]:
        assert attribute == 2
        return (0, 1) if self.is_pinned(address) else (1, 0)

    def do_cuMemcpyHtoD(self, target: int, source: bytes, size: int) -> None:
        ctypes.memmove(int(target), source, size)

    def do_cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert not self.is_pinned(target) and not self.is_pinned(source)
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size))

    def do_cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert self.on_device(target) and not self.on_device(source) and stream not in self.capturing
        ctypes.memmove(target, source, size)

    def do_cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert self.on_device(source) and not self.on_device(target) and stream not in self.capturing
        ctypes.memmove(target, source, size)

    def do_cuMemcpy3DAsync(self, params: Any, stream: int) -> None:
        self._enqueue(stream, lambda: self._copy_block(params))

    def _copy_block(self, params: Any) -> None:
        for z, y in itertools.product(range(params.Depth), range(params.Height)):
            target = params.dstDevice + (z * params.dstHeight + y) * params.dstPitch
            ctypes.memmove(target, params.srcDevice + (z * params.srcHeight + y) * params.srcPitch, params.WidthInBytes)

    # --- streams and events -----------------------------------------------------------------------------------

    def do_cuStreamCreate(self, flags: int) -> Handle:
        return self._make("stream")

    def do_cuStreamDestroy(self, stream: int) -> None:
        self._drop(stream)

    def do_cuStreamSynchronize(self, stream: int) -> None:
        assert stream not in self.capturing, "a stream that is being captured cannot be waited for"

    def do_cuStreamQuery(self, stream: int) -> None:
        assert stream in self.live

    def do_cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        assert event in self.live
        assert stream not in self.capturing, "an event of outside the capture"

    def do_cuStreamIsCapturing(self, stream: int) -> int:
        assert stream not in (0, 1)
        return int(stream in self.capturing)

    def do_cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        before = self.mode()
        self._current.mode = mode
        return before

    def mode(self) -> int:
        """Returns the calling thread's capture mode: 0 global, 2 relaxed."""
        return int(getattr(self._current, "mode", 0))

    def do_cuEventCreate(self, flags: int) -> Handle:
        return self._make("event")

    def do_cuEventRecord(self, event: int, stream: int) -> None:
        assert event in self.live
        assert stream not in self.capturing, "who waits for this event joins the capture"

    def do_cuEventElapsedTime(self, start: int, end: int) -> float:
        assert start in self.live and end in self.live
        return float(end - start)

    def do_cuEventSynchronize(self, event: int) -> None:
        assert event in self.live

    def do_cuEventDestroy(self, event: int) -> None:
        self._drop(event)

    # --- modules ----------------------------------------------------------------------------------------------

    def do_cuModuleLoadData(self, image: bytes) -> Handle:
        return self._make({name: ctypes.create_string_buffer(size) for name, size in SYMBOLS.items()})

    def do_cuModuleUnload(self, module: int) -> None:
        self._drop(module)

    def do_cuModuleGetFunction(self, module: int, symbol: bytes) -> Any:
        function = Handle(next(self._numbers))
        self.functions[function] = SimpleNamespace(symbol=symbol.decode(), data=self.live[module], attributes={})
        return function

    def do_cuModuleGetGlobal(self, module: int, symbol: bytes) -> Any:
        data = self.live[module][symbol.decode()]
        return (0, ctypes.addressof(data), len(data))

    def do_cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.functions[function].attributes[attribute] = value

    def do_cuFuncGetParamInfo(self, function: int, index: int) -> Any:
        params = PARAMS[self.functions[function].symbol]
        return (0, *params[index]) if index < len(params) else (1, None, None)

    # --- launches ---------------------------------------------------------------------------------------------

    def _kernel(self, handle: int, address: int) -> Any:
        """Returns a function that runs the kernel; it copies the parameters now."""
        function = self.functions[handle]
        sizes = [size for _, size in PARAMS[function.symbol]]
        pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
        block = [ctypes.string_at(pointer or 0, size) for pointer, size in zip(pointers, sizes, strict=True)]
        if function.symbol == SET_CONDITION:
            return lambda: self._set_condition(block)
        return lambda: KERNELS[function.symbol](block, function.data)

    def _set_condition(self, block: list[bytes]) -> None:
        at, handle = [int.from_bytes(word, "little") for word in block]
        assert handle in self.conditions, "a handle of no graph"
        self.conditions[handle] = ctypes.string_at(at, 1)[0]

    def do_cuLaunchKernelEx(self, config: Any, function: int, params: int, extra: None) -> None:
        self._enqueue(config.hStream or 0, self._kernel(function, params))

    def do_cuGraphCreate(self, flags: int) -> Handle:
        return self._make(SimpleNamespace(nodes=[], edges=[], bodies=[]))

    def do_cuGraphDestroy(self, graph: int) -> None:
        for body in self._contents(graph).bodies:
            self.do_cuGraphDestroy(body)
        self._drop(graph)

    def _contents(self, graph: int) -> Any:
        return self.live[int(graph)]

    def _node(self, graph: int, run: Any) -> Any:
        node = SimpleNamespace(run=run, attributes={}, graph=int(graph))
        self._contents(graph).nodes.append(node)
        return node

    def do_cuGraphClone(self, graph: int) -> Handle:
        contents = self._contents(graph)
        assert not contents.bodies
        clone = self._make(SimpleNamespace(nodes=[], edges=[], bodies=[]))
        copies = {}
        for node in contents.nodes:
            copies[id(node)] = node_copy = self._node(clone, node.run)
            node_copy.origin = node
        self._contents(clone).edges += [(copies[id(source)], copies[id(target)]) for source, target in contents.edges]
        return clone

    def do_cuGraphNodeFindInClone(self, node: Any, clone: int) -> Any:
        (node_copy,) = [candidate for candidate in self._contents(clone).nodes if candidate.origin is node]
        return node_copy

    def do_cuGraphDestroyNode(self, node: Any) -> None:
        contents = self._contents(node.graph)
        contents.nodes = [other for other in contents.nodes if other is not node]
        contents.edges = [ends for ends in contents.edges if not any(end is node for end in ends)]

    # --- conditional nodes ------------------------------------------------------------------------------------

    def do_cuGraphConditionalHandleCreate(self, graph: int, context: int, default: int, flags: int) -> Handle:
        assert int(graph) in self.live and context == 7
        handle = Handle(next(self._numbers))
        self.conditions[handle] = 0
        return handle

    def do_cuGraphAddConditionalNode(self, graph: int, dependencies: None, count: int, params: Any) -> Any:
        node_params = params.conditional
        assert (params.type, node_params.ctx) == (13, 7) and 1 <= node_params.size <= (2, 1, 256)[node_params.type]
        bodies = [self.do_cuGraphCreate(0) for _ in range(node_params.size)]
        node_params.phGraph_out = (ctypes.c_uint64 * node_params.size)(*bodies)
        handle, kind = node_params.handle, node_params.type
        contents = [self._contents(body) for body in bodies]
        self._contents(graph).bodies += bodies

        def body(number: int) -> None:
            for run in self._runs(contents[number]):
                run()

        def run() -> None:
            while kind == 1 and self.conditions[handle]:
                body(0)
            chosen = self.conditions[handle] if kind == 2 else int(not self.conditions[handle])
            if kind != 1 and chosen < len(contents):
                body(chosen)

        return self._node(graph, run)

    def do_cuGraphAddKernelNode(self, graph: int, dependencies: None, count: int, params: Any) -> Any:
        return self._node(graph, self._kernel(params.func, params.kernelParams))

    def do_cuGraphAddMemsetNode(self, graph: int, dependencies: None, count: int, params: Any, context: int) -> Any:
        assert params.height == 1
        name = {size: name for name, size in FLAT.items()}[params.elementSize]
        address, value, width = params.dst, params.value, params.width
        return self._node(graph, lambda: self._memset(name, address, value, width, 0))

    def do_cuGraphAddMemcpyNode(self, graph: int, dependencies: None, count: int, params: Any, context: int) -> Any:
        copy_params = Memcpy3D.from_buffer_copy(params)  # the real driver copies the parameters too
        return self._node(graph, lambda: self._copy_block(copy_params))

    def do_cuGraphAddEmptyNode(self, graph: int, dependencies: None, count: int) -> Any:
        return self._node(graph, lambda: None)

    def do_cuGraphKernelNodeSetAttribute(self, node: Any, attribute: int, value: Any) -> None:
        node.attributes[attribute] = bytes(value)

    def do_cuGraphAddDependencies(self, graph: int, sources: Any, targets: Any, data: Any) -> None:
        assert all(node in self._contents(graph).nodes for node in (*sources, *targets)), "an edge between two graphs"
        assert len({bytes(item) for item in data or ()}) < 2, "the driver takes the data of the first edge for all"
        self._contents(graph).edges += zip(sources, targets, strict=True)

    def _in_order(self, graph: int) -> list[Callable[[], object]]:
        return self._runs(self._contents(graph))

    def _runs(self, contents: Any) -> list[Callable[[], object]]:
        return [node.run for node in self._nodes(contents)]

    @staticmethod
    def _nodes(contents: Any) -> list[Any]:
        pending, done = list(contents.nodes), []
        while pending:  # run the last node that may run: a missing edge must change the order
            ready = [n for n in pending if not any(target is n and source in pending for source, target in contents.edges)]
            done.append(ready[-1])
            pending.remove(ready[-1])
        return done

    def do_cuGraphInstantiate(self, graph: int, flags: int) -> Handle:
        return self._make([(node, node.run) for node in self._nodes(self._contents(graph))])

    def do_cuGraphExecKernelNodeSetParams(self, executable: int, node: Any, params: Any) -> None:
        runs = self.live[executable]
        (place,) = [place for place, (candidate, _) in enumerate(runs) if candidate is node]
        runs[place] = (node, self._kernel(params.func, params.kernelParams))

    def do_cuGraphExecMemcpyNodeSetParams(self, executable: int, node: Any, params: Any, context: int) -> int:
        copy_params = Memcpy3D.from_buffer_copy(params)
        if copy_params.dstDevice in self.refused:
            return 1
        runs = self.live[executable]
        (place,) = [place for place, (candidate, _) in enumerate(runs) if candidate is node]
        runs[place] = (node, lambda: self._copy_block(copy_params))
        return 0

    def do_cuGraphNodeSetEnabled(self, executable: int, node: Any, enabled: bool) -> None:
        change = self.disabled.discard if enabled else self.disabled.add
        change((int(executable), id(node)))

    def do_cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        if int(stream) in self.captures:
            graph = self.captures[int(stream)]
            contents = self._contents(graph)
            last = [node for node in contents.nodes if not any(source is node for source, _ in contents.edges)]
            return 0, graph, last
        assert int(stream) in self.capturing
        return 0, stream, []

    def do_cuGraphAddChildGraphNode(self, graph: int, dependencies: list[Any], child: int) -> Any:
        assert int(graph) in self.capturing
        runs = self._in_order(child)
        return SimpleNamespace(stream=int(graph), run=lambda: [run() for run in runs])

    def do_cuStreamUpdateCaptureDependencies(self, stream: int, nodes: list[Any], flags: int) -> None:
        if int(stream) in self.captures:
            return
        (node,) = nodes
        assert (node.stream, flags) == (int(stream), 1)
        self.captured.append(node.run)

    def do_cuGraphUpload(self, graph: int, stream: int) -> None:
        assert graph in self.live

    def do_cuGraphLaunch(self, graph: int, stream: int) -> None:
        assert int(stream) not in self.capturing, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        for run in self._launched(graph):
            run()

    def _launched(self, graph: int) -> list[Callable[[], object]]:
        return [run for node, run in self.live[graph] if (int(graph), id(node)) not in self.disabled]

    def do_cuGraphExecDestroy(self, graph: int) -> None:
        self._drop(graph)


def floats(address: int, count: int) -> array[float]:
    return array("f", ctypes.string_at(address, 4 * count))


def add(block: list[bytes], data: dict[str, Any]) -> None:
    out, a, b = (int.from_bytes(word, "little") for word in block[:3])
    (n,) = unpack("<i", block[3])
    sums = array("f", [x + y for x, y in zip(floats(a, n), floats(b, n), strict=True)])
    ctypes.memmove(out, sums.tobytes(), 4 * n)


def combine(block: list[bytes], data: dict[str, Any]) -> None:
    out, y = int.from_bytes(block[0], "little"), int.from_bytes(block[2], "little")
    x, factor, _ = unpack("<Qfi", block[1])
    (n,) = unpack("<i", block[3])
    (bias,) = unpack("<f", data["bias"].raw)
    table = floats(int.from_bytes(data["table"].raw, "little"), n)
    values = array("f", [p * factor + q + bias + r for p, q, r in zip(floats(x, n), floats(y, n), table, strict=True)])
    ctypes.memmove(out, values.tobytes(), 4 * n)


KERNELS = {"add": add, "combine": combine}
PARAMS = {"add": ADD, "combine": COMBINE, SET_CONDITION: ((0, 8), (8, 8))}
