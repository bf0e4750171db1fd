"""Two ways to run the rows of a table: as one CUDA graph, or one by one on a stream.

Both are made from the same patched parameter blocks.  `GraphExecutor` is what serves: one driver call per run, whatever the
number of nodes.  `StreamExecutor` launches the same rows in a topological order: the debugger, the profiler's baseline and the
oracle of the tests.  (A programmatic edge only lets a kernel start early, so running the rows strictly one after the other is
right.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any, Protocol

from ..tables.table import KERNEL, MEMCPY, MEMSET, Table, launch_order
from .driver import Context, check, cu
from .modules import Modules

PRIORITY, MEMORY_SYNC_DOMAIN_MAP = 8, 9
"""Launch attributes with a meaning beyond their value."""

_WORD = Struct("<Q")


class Executor(Protocol):
    """A recording, ready to run at the addresses it was made for."""

    def launch(self, stream: Any) -> None:
        """Runs the recording in the order of the stream; returns before it is done."""

    def join(self, stream: Any) -> None:
        """Makes the recording a part of what is being captured on the stream."""

    def close(self) -> None:
        """Gives the driver's objects back."""


class Launches:
    """What both executors need of the kernels: functions, and parameter blocks that hold this process's addresses.

    `params[row]` is the address of the array of pointers to the parameters of kernel `row`; it is valid while this object lives.
    Bytes of undefined ranges are `poison`, or zero when that is None.
    """

    __slots__ = ("_blocks", "_pointers", "functions", "params")

    def __init__(self, table: Table, modules: Modules, bases: Sequence[int], poison: int | None) -> None:
        layouts: list[list[int]] = []
        self.functions: list[Any] = []
        for row, (image, symbol) in enumerate(zip(table.images, table.symbols, strict=True)):
            own = slice(table.param_bounds[row], table.param_bounds[row + 1])
            layouts.append(table.param_offset[own].tolist())
            params = list(zip(layouts[-1], table.param_size[own], strict=True))
            own = slice(table.function_attribute_bounds[row], table.function_attribute_bounds[row + 1])
            settings = zip(table.function_attribute_id[own], table.function_attribute_value[own], strict=True)
            self.functions.append(modules.function(image, symbol, params, settings))
        self._blocks = patch(table, bases, poison)
        start = self._blocks.buffer_info()[0]
        self._pointers = array("Q")
        counts = []
        for function, offset in zip(table.function, table.block_offset, strict=True):
            counts.append(8 * len(self._pointers))
            self._pointers.extend([start + offset + param for param in layouts[function]])
        first = self._pointers.buffer_info()[0]
        self.params = [first + count for count in counts]


def patch(table: Table, bases: Sequence[int], poison: int | None) -> array[int]:
    """The table's parameter blocks with every relocated word the address of its target: `bases` are the memories' addresses."""
    blocks = array("B", table.blocks.tobytes())
    write = _WORD.pack_into
    limits = table.relocation_bounds.tolist()
    rows = list(zip(table.relocation_at, table.relocation_memory, table.relocation_offset, strict=True))
    for kernel, begin in enumerate(table.block_offset):
        for at, memory, offset in rows[limits[kernel] : limits[kernel + 1]]:
            write(blocks, begin + at, bases[memory] + offset)
        if poison is not None:
            own = slice(table.undefined_bounds[kernel], table.undefined_bounds[kernel + 1])
            for offset, size in zip(table.undefined_offset[own], table.undefined_size[own], strict=True):
                blocks[begin + offset : begin + offset + size] = array("B", [poison]) * size
    return blocks


def attributes(table: Table, row: int) -> list[tuple[Any, Any]]:
    """The launch attributes of kernel `row`: (CUlaunchAttributeID, CUkernelNodeAttrValue)."""
    found = []
    for index in range(table.attribute_bounds[row], table.attribute_bounds[row + 1]):
        number = table.attribute_id[index]
        words = table.attribute_value[3 * index : 3 * index + 3]
        value = cu.CUkernelNodeAttrValue()  # of which a node takes no base class, and a launch takes either
        # Through the union's bytes: its members are one to three words, but the bindings refuse -1 for some that take it.
        size = 1 if number == MEMORY_SYNC_DOMAIN_MAP else 4
        value.pad = b"".join((word % (1 << 8 * size)).to_bytes(size, "little") for word in words).ljust(64, b"\0")
        found.append((cu.CUlaunchAttributeID(number), value))
    return found


def copy_params(table: Table, row: int, bases: Sequence[int]) -> Any:
    """Memcpy `row` as the driver takes it."""
    params = cu.CUDA_MEMCPY3D()
    params.srcMemoryType = params.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.srcDevice = bases[table.memcpy_memory[2 * row]] + table.memcpy_offset[2 * row]
    params.dstDevice = bases[table.memcpy_memory[2 * row + 1]] + table.memcpy_offset[2 * row + 1]
    params.WidthInBytes, params.Height, params.Depth = table.memcpy_extent[3 * row : 3 * row + 3]
    params.srcPitch, params.srcHeight, params.dstPitch, params.dstHeight = table.memcpy_pitch[4 * row : 4 * row + 4]
    return params


class GraphExecutor:
    """A recording as one executable CUDA graph of the context.  Raises table-invalid, driver-failed, OutOfMemory."""

    __slots__ = ("_exec", "_graph")

    def __init__(
        self, context: Context, table: Table, modules: Modules, bases: Sequence[int], stream: Any, poison: int | None = None
    ) -> None:
        graph = check("cuGraphCreate", cu.cuGraphCreate(0))
        try:
            _build(graph, context, table, Launches(table, modules, bases, poison), bases)
            priorities = PRIORITY in table.attribute_id.tolist()
            flags = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY if priorities else 0
            self._exec = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, int(flags)), table.where)
        except BaseException:
            cu.cuGraphDestroy(graph)
            raise
        self._graph = graph  # the executable one holds copies of everything; this one is for `join`
        try:
            check("cuGraphUpload", cu.cuGraphUpload(self._exec, stream), table.where)
        except BaseException:
            self.close()
            raise

    def launch(self, stream: Any) -> None:
        """Runs the recording in the order of the stream; returns before it is done."""
        error = cu.cuGraphLaunch(self._exec, stream)[0]
        if error:
            check("cuGraphLaunch", (error,))

    def join(self, stream: Any) -> None:
        """Adds the recording as a child graph to the graph that is being captured on the stream, behind what is there.  (An
        executable graph cannot be launched into a capture: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.)"""
        answer = check("cuStreamGetCaptureInfo", cu.cuStreamGetCaptureInfo(stream))
        _, _, graph, nodes, _, count = answer
        child = check("cuGraphAddChildGraphNode", cu.cuGraphAddChildGraphNode(graph, nodes, count, self._graph))
        flag = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        answer = cu.cuStreamUpdateCaptureDependencies(stream, [child], None, 1, int(flag))
        check("cuStreamUpdateCaptureDependencies", answer)

    def close(self) -> None:
        """Destroys the graphs; a run in flight finishes first."""
        cu.cuGraphDestroy(self._graph)
        check("cuGraphExecDestroy", cu.cuGraphExecDestroy(self._exec))


def _build(graph: Any, context: Context, table: Table, launches: Launches, bases: Sequence[int]) -> None:
    """Adds the table's nodes and edges to an empty graph."""
    nodes: list[Any] = []
    kernel_params = _kernel_params(table, launches)
    for kind, row in _rows(table):
        if kind == KERNEL:
            call, result = "cuGraphAddKernelNode", cu.cuGraphAddKernelNode(graph, None, 0, kernel_params(row))
        elif kind == MEMSET:
            params = _memset_params(table, row, bases)
            call, result = "cuGraphAddMemsetNode", cu.cuGraphAddMemsetNode(graph, None, 0, params, context.handle)
        elif kind == MEMCPY:
            params = copy_params(table, row, bases)
            call, result = "cuGraphAddMemcpyNode", cu.cuGraphAddMemcpyNode(graph, None, 0, params, context.handle)
        else:
            call, result = "cuGraphAddEmptyNode", cu.cuGraphAddEmptyNode(graph, None, 0)
        if result[0]:
            check(call, result, _describe(table, len(nodes), kind, row))
        nodes.append(result[1])
        if kind == KERNEL and table.attribute_bounds[row] != table.attribute_bounds[row + 1]:
            for number, value in attributes(table, row):
                answer = cu.cuGraphKernelNodeSetAttribute(nodes[-1], number, value)
                check("cuGraphKernelNodeSetAttribute", answer, f"{number.name}, {_describe(table, len(nodes) - 1, kind, row)}")
    _connect(graph, table, nodes)


def _rows(table: Table) -> Iterator[tuple[int, int]]:
    """(kind, row among those of its kind) of every node."""
    counts = [0, 0, 0, 0]
    for kind in table.kind:
        yield kind, counts[kind]
        counts[kind] += 1


def _kernel_params(table: Table, launches: Launches) -> Callable[[int], Any]:
    """Fills one parameter object for kernel after kernel: the driver copies it when a node is added."""
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    grids = list(zip(table.grid_x, table.grid_y, table.grid_z, strict=True))
    threads = list(zip(table.threads_x, table.threads_y, table.threads_z, strict=True))

    def fill(row: int) -> Any:
        params.func = launches.functions[table.function[row]]
        params.gridDimX, params.gridDimY, params.gridDimZ = grids[row]
        params.blockDimX, params.blockDimY, params.blockDimZ = threads[row]
        params.sharedMemBytes = table.shared[row]
        params.kernelParams = launches.params[row]
        return params

    return fill


def _memset_params(table: Table, row: int, bases: Sequence[int]) -> Any:
    params = cu.CUDA_MEMSET_NODE_PARAMS()
    params.dst = bases[table.memset_memory[row]] + table.memset_offset[row]
    params.value, params.elementSize = _memset_value(table, row), table.memset_element[row]
    params.width, params.height, params.pitch = table.memset_width[row], table.memset_height[row], table.memset_pitch[row]
    return params


def _memset_value(table: Table, row: int) -> int:
    """The value's low bytes, as many as an element has: a recorded -1 may have four of them set for a single byte."""
    return int(table.memset_value[row] % (1 << 8 * table.memset_element[row]))


def _connect(graph: Any, table: Table, nodes: list[Any]) -> None:
    count = table.counts["edges"]
    if not count:
        return
    sources = [nodes[index] for index in table.edge_source]
    targets = [nodes[index] for index in table.edge_target]
    data = None
    if any(table.edge_type) or any(table.edge_from_port) or any(table.edge_to_port):
        data = []
        for out, into, kind in zip(table.edge_from_port, table.edge_to_port, table.edge_type, strict=True):
            edge = cu.CUgraphEdgeData()
            edge.from_port, edge.to_port, edge.type = out, into, kind
            data.append(edge)
    check("cuGraphAddDependencies", cu.cuGraphAddDependencies(graph, sources, targets, data, count), table.where)


def _describe(table: Table, position: int, kind: int, row: int) -> str:
    symbol = f" ({table.symbols[table.function[row]]})" if kind == KERNEL else ""
    return f"{table.where}: nodes[{position}]{symbol}"


class StreamExecutor:
    """A recording launched row by row.  Raises table-invalid, driver-failed, OutOfMemory."""

    __slots__ = ("_launches", "_steps")

    def __init__(self, table: Table, modules: Modules, bases: Sequence[int], poison: int | None = None) -> None:
        self._launches = Launches(table, modules, bases, poison)  # the driver reads the blocks at every launch
        steps: list[Callable[[Any], None] | None] = []
        for position, (kind, row) in enumerate(_rows(table)):
            where = _describe(table, position, kind, row)
            if kind == KERNEL:
                steps.append(_kernel_step(table, row, self._launches, where))
            elif kind == MEMSET:
                steps.append(_memset_step(table, row, bases, where))
            elif kind == MEMCPY:
                steps.append(_memcpy_step(copy_params(table, row, bases), where))
            else:
                steps.append(None)
        self._steps = [step for position in launch_order(table) if (step := steps[position]) is not None]

    def launch(self, stream: Any) -> None:
        """Runs the recording in the order of the stream; returns before it is done."""
        for step in self._steps:
            step(stream)

    join = launch
    """Launches on a stream that is being captured are captured."""

    def close(self) -> None:
        """Drops the parameter blocks."""
        self._steps = []


def _kernel_step(table: Table, row: int, launches: Launches, where: str) -> Callable[[Any], None]:
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = table.grid_x[row], table.grid_y[row], table.grid_z[row]
    config.blockDimX, config.blockDimY, config.blockDimZ = table.threads_x[row], table.threads_y[row], table.threads_z[row]
    config.sharedMemBytes = table.shared[row]
    listed = []
    for number, value in attributes(table, row):
        attribute = cu.CUlaunchAttribute()
        attribute.id, attribute.value = number, value
        listed.append(attribute)
    config.attrs, config.numAttrs = listed, len(listed)
    function, params = launches.functions[table.function[row]], launches.params[row]

    def step(stream: Any) -> None:
        config.hStream = stream
        check("cuLaunchKernelEx", cu.cuLaunchKernelEx(config, function, params, 0), where)

    return step


def _memset_step(table: Table, row: int, bases: Sequence[int], where: str) -> Callable[[Any], None]:
    element, value, width = table.memset_element[row], _memset_value(table, row), table.memset_width[row]
    height, pitch = table.memset_height[row], table.memset_pitch[row]
    address = bases[table.memset_memory[row]] + table.memset_offset[row]
    flat = {1: cu.cuMemsetD8Async, 2: cu.cuMemsetD16Async, 4: cu.cuMemsetD32Async}[element]
    pitched = {1: cu.cuMemsetD2D8Async, 2: cu.cuMemsetD2D16Async, 4: cu.cuMemsetD2D32Async}[element]

    def step(stream: Any) -> None:
        if height == 1:
            check(flat.__name__, flat(address, value, width, stream), where)
        else:
            check(pitched.__name__, pitched(address, pitch, value, width, height, stream), where)

    return step


def _memcpy_step(params: Any, where: str) -> Callable[[Any], None]:
    def step(stream: Any) -> None:
        check("cuMemcpy3DAsync", cu.cuMemcpy3DAsync(params, stream), where)

    return step
