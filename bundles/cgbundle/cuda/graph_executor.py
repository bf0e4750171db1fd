"""A table as one CUDA graph, launched by one driver call. Branches and loops are the driver's conditional nodes. Nodes that copy
outputs come after all others, and a launch sets their destinations: 1.6 us of CPU time instead of 6 for a separate copy
(tests/gpu/REPORT.md). Launches without destinations disable them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..format.table import CONDITIONAL, KERNEL, MEMCPY, MEMSET, Table, invalid
from . import libcuda
from .driver import Context, call, check, cu
from .kernels import INPUTS, CopyingLaunch, Launches, Modules, Reader, attributes, copy_params, describe, memset_value, rows
from .structures import ConditionalNodeParams, EdgeData, KernelNodeParams, Memcpy3D, MemsetNodeParams

PRIORITY = 8  # a launch attribute that needs a flag at instantiation
READERS = 6
"""Maximum number of kernels whose parameters are set instead of copying an input: 0.8 us each, not 6 (tests/gpu/REPORT.md)."""

COPIES = 8  # maximum number of outputs that nodes copy; with more outputs, there are no such nodes


class GraphExecutor:
    """A recording as an executable CUDA graph. `outputs`: (address, bytes) that the launch of `copying` copies. `readers`: all
    kernels with addresses of memory inputs, if these can be changed. Raises table-invalid, driver-failed, OutOfMemory."""

    __slots__ = ("_build", "_context", "_copying", "_exec", "_graph", "_nodes", "_params", "readers")

    def __init__(
        self,
        context: Context,
        table: Table,
        modules: Modules,
        bases: Sequence[int],
        stream: Any,
        poison: int | None = None,
        outputs: Sequence[tuple[int, int]] = (),
    ) -> None:
        build = _Build(context, table, Launches(table, modules, bases, poison), bases)
        self._context, self._build = context.handle, build if table.counts["conditionals"] else None
        self._nodes: list[Any] = []  # the output copy nodes, and their parameters
        self._params: list[Memcpy3D] = []
        self._copying: bool | None = False  # whether the copy nodes are enabled, None after a failed switch
        self._graph = call("cuGraphCreate", 0)  # kept for `join`: the executable graph has copies of all nodes
        try:
            nodes = build.into(self._graph)
            if len(outputs) <= COPIES and self._build is None:
                self._add_copies(table, nodes, outputs)
            flags = libcuda.INSTANTIATE_USE_NODE_PRIORITY if PRIORITY in table.attribute_id.tolist() else 0
            self._exec = call("cuGraphInstantiate", self._graph, flags, detail=table.where)
        except BaseException:
            cu.cuGraphDestroy(self._graph)
            raise
        try:
            self.readers: Sequence[Reader] = build.readers(nodes, self._exec)
            if self._nodes:
                self._switch(False)
            call("cuGraphUpload", self._exec, stream, detail=table.where)
        except BaseException:
            self.close()
            raise

    def launch(self, stream: Any) -> None:
        if self._copying is not False:
            self._switch(False)
        error = cu.cuGraphLaunch(self._exec, stream)
        if error:
            check("cuGraphLaunch", error)

    def copying(self) -> CopyingLaunch | None:
        executable, context, nodes = self._exec, self._context, list(zip(self._params, self._nodes, strict=True))

        def launch(targets: Sequence[int], stream: Any) -> bool:
            if self._copying is not True:
                self._switch(True)
            for (params, node), target in zip(nodes, targets):  # noqa: B905  equal lengths: a check costs 0.1 us per call
                params.dstDevice = target
                error = cu.cuGraphExecMemcpyNodeSetParams(executable, node, params, context)
                if error:
                    self._switch(False)
                    if error == libcuda.INVALID_VALUE:
                        return False
                    check("cuGraphExecMemcpyNodeSetParams", error)
            error = cu.cuGraphLaunch(executable, stream)
            if error:
                check("cuGraphLaunch", error)
            return True

        return launch if nodes else None

    def join(self, stream: Any) -> None:
        """Adds the recording to the graph that is being captured on the stream: as a child graph, or node by node with conditional
        nodes. (An executable graph cannot be launched into a capture: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.)"""
        graph, nodes = call("cuStreamGetCaptureInfo", stream)
        if self._build is not None:
            last = self._build.behind(graph, nodes)
        else:
            child = self._without_copies() if self._nodes else self._graph
            try:
                last = [call("cuGraphAddChildGraphNode", graph, nodes, child)]
            finally:
                if child is not self._graph:
                    cu.cuGraphDestroy(child)
        call("cuStreamUpdateCaptureDependencies", stream, last, libcuda.SET_CAPTURE_DEPENDENCIES)

    def close(self) -> None:
        """Destroys the graphs; the driver finishes a running launch first."""
        cu.cuGraphDestroy(self._graph)
        call("cuGraphExecDestroy", self._exec)

    def _add_copies(self, table: Table, nodes: Sequence[Any], outputs: Sequence[tuple[int, int]]) -> None:
        """Each node copies an output to itself until a launch sets a destination. Dependencies on the last nodes suffice, as for a
        copy captured after a recording's last launch: a kernel that starts before its predecessor has ended waits for it (PTX ISA,
        griddepcontrol)."""
        followed = set(table.edge_source)
        last = [node for index, node in enumerate(nodes) if index not in followed]
        for address, size in outputs:
            params = Memcpy3D()
            params.srcMemoryType = params.dstMemoryType = libcuda.MEMORY_TYPE_DEVICE
            params.srcDevice = params.dstDevice = address
            params.WidthInBytes = params.srcPitch = params.dstPitch = size
            params.Height = params.Depth = params.srcHeight = params.dstHeight = 1
            about = f"{table.where}: copies of outputs"
            node = call("cuGraphAddMemcpyNode", self._graph, None, 0, params, self._context, detail=about)
            call("cuGraphAddDependencies", self._graph, last, [node] * len(last), None, detail=table.where)
            self._params.append(params)
            self._nodes.append(node)

    def _without_copies(self) -> Any:
        clone = call("cuGraphClone", self._graph)
        try:
            for node in self._nodes:
                copied = call("cuGraphNodeFindInClone", node, clone)
                call("cuGraphDestroyNode", copied)
        except BaseException:
            cu.cuGraphDestroy(clone)
            raise
        return clone

    def _switch(self, on: bool) -> None:
        self._copying = None  # in case a node fails
        for node in self._nodes:
            error = cu.cuGraphNodeSetEnabled(self._exec, node, on)
            if error:
                check("cuGraphNodeSetEnabled", error)
        self._copying = on


class _Build:
    __slots__ = ("_bases", "_context", "_fill", "_launches", "_rows", "_spans", "_table")

    def __init__(self, context: Context, table: Table, launches: Launches, bases: Sequence[int]) -> None:
        self._context, self._table, self._launches, self._bases = context, table, launches, bases
        self._fill, self._rows, self._spans = _kernel_params(table, launches), list(rows(table)), table.spans()

    def into(self, graph: Any) -> list[Any]:
        """Adds everything to a graph; returns all nodes, with those of bodies."""
        table, nodes = self._table, list[Any]()
        graphs = [graph]  # and those of bodies, which the driver creates with the conditional node in an earlier graph
        for number, (begin, end) in enumerate(self._spans):
            if number == len(graphs):
                raise invalid(f"{table.where}: bodies", f"body {number - 1} belongs to no node before it")
            graph, span = graphs[number], self._rows[begin:end]
            handles = {row: self._handle(graph, row) for kind, row in span if kind == CONDITIONAL}
            for kind, row in span:
                if kind == CONDITIONAL:
                    node, bodies = self._conditional(graph, row, handles[row], len(nodes))
                    nodes.append(node)
                    graphs += bodies
                else:
                    nodes.append(self._add(graph, kind, row, len(nodes)))
        self._connect(graphs, nodes)
        return nodes

    def readers(self, nodes: Sequence[Any], executable: Any) -> list[Reader]:
        """Readers of the executable graph; none if a copy uses inputs, with conditional nodes, or for too many kernels."""
        table, launches = self._table, self._launches
        if table.counts["conditionals"] or INPUTS in table.memcpy_memory.tolist():
            return []
        memories, bounds = table.relocation_memory, table.relocation_bounds
        kernels = range(table.counts["kernels"])
        reading = [row for row in kernels if INPUTS in memories[slice(*bounds[row : row + 2])].tolist()]
        if len(reading) > READERS:
            return []
        positions = [position for position, (kind, _) in enumerate(self._rows) if kind == KERNEL]
        params = [_kernel_params(table, launches)(row) for row in reading]  # a parameter object for each
        return [
            Reader(table, row, launches, filled, _setter(executable, nodes[positions[row]]))
            for row, filled in zip(reading, params, strict=True)
        ]

    def behind(self, graph: Any, after: Sequence[Any]) -> list[Any]:
        """Adds everything after the nodes `after`; returns the nodes without successors."""
        nodes, main = self.into(graph), range(*self._spans[0])
        waiting, leading = set(self._table.edge_target), set(self._table.edge_source)
        pairs = [(source, nodes[index]) for source in after for index in main if index not in waiting]
        if pairs:
            sources, targets = [list(ends) for ends in zip(*pairs, strict=True)]
            call("cuGraphAddDependencies", graph, sources, targets, None, detail=self._table.where)
        return [nodes[index] for index in main if index not in leading]

    def _add(self, graph: Any, kind: int, row: int, position: int) -> Any:
        table, context = self._table, self._context.handle
        if kind == KERNEL:
            name, result = "cuGraphAddKernelNode", cu.cuGraphAddKernelNode(graph, None, 0, self._fill(row))
        elif kind == MEMSET:
            filled = _memset_params(table, row, self._bases)
            name, result = "cuGraphAddMemsetNode", cu.cuGraphAddMemsetNode(graph, None, 0, filled, context)
        elif kind == MEMCPY:
            copied = copy_params(table, row, self._bases)
            name, result = "cuGraphAddMemcpyNode", cu.cuGraphAddMemcpyNode(graph, None, 0, copied, context)
        else:
            name, result = "cuGraphAddEmptyNode", cu.cuGraphAddEmptyNode(graph, None, 0)
        if result[0]:
            check(name, result, describe(table, position, kind, row))
        node = result[1]
        if kind == KERNEL and table.attribute_bounds[row] != table.attribute_bounds[row + 1]:
            for number, value in attributes(table, row):
                about = f"attribute {number}, {describe(table, position, kind, row)}"
                call("cuGraphKernelNodeSetAttribute", node, number, value, detail=about)
        return node

    def _handle(self, graph: Any, row: int) -> Any:
        handle = call("cuGraphConditionalHandleCreate", graph, self._context.handle, 0, 0, detail=self._table.where)
        self._launches.set_handle(row, int(handle))
        return handle

    def _conditional(self, graph: Any, row: int, handle: Any, position: int) -> tuple[Any, list[Any]]:
        params, table = ConditionalNodeParams(type=libcuda.NODE_TYPE_CONDITIONAL), self._table
        first, last = table.conditional_bounds[row : row + 2]
        params.conditional.handle, params.conditional.ctx = handle, self._context.handle
        kinds = (libcuda.CONDITION_IF, libcuda.CONDITION_WHILE, libcuda.CONDITION_SWITCH)
        params.conditional.type = kinds[table.conditional_type[row]]
        params.conditional.size = last - first
        answer = cu.cuGraphAddConditionalNode(graph, None, 0, params)
        node = check("cuGraphAddNode", answer, describe(table, position, CONDITIONAL, row))
        return node, params.conditional.phGraph_out[: last - first]

    def _connect(self, graphs: Sequence[Any], nodes: Sequence[Any]) -> None:
        """Adds the edges, one call for each graph and kind of edge: with several kinds the driver gives all edges the first kind,
        without an error (CUDA 13.0; tests/gpu/REPORT.md)."""
        table = self._table
        edges: dict[tuple[int, int, int, int], tuple[list[Any], list[Any]]] = {}
        columns = (table.edge_source, table.edge_target, table.edge_from_port, table.edge_to_port, table.edge_type)
        for source, target, out, into, kind in zip(*columns, strict=True):
            number = 0 if len(graphs) == 1 else table.graph(source)
            sources, targets = edges.setdefault((number, out, into, kind), ([], []))
            sources.append(nodes[source])
            targets.append(nodes[target])
        for (number, out, into, kind), (sources, targets) in edges.items():
            data = [EdgeData(from_port=out, to_port=into, type=kind)] * len(sources) if out or into or kind else None
            call("cuGraphAddDependencies", graphs[number], sources, targets, data, detail=table.where)


def _setter(executable: Any, node: Any) -> Callable[[KernelNodeParams], None]:

    def set(params: KernelNodeParams) -> None:
        error = cu.cuGraphExecKernelNodeSetParams(executable, node, params)
        if error:
            check("cuGraphExecKernelNodeSetParams", error)

    return set


def _kernel_params(table: Table, launches: Launches) -> Callable[[int], Any]:
    """A function that fills one parameter object for every kernel: the driver copies it."""
    params = KernelNodeParams()
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


def _memset_params(table: Table, row: int, bases: Sequence[int]) -> MemsetNodeParams:
    params = MemsetNodeParams()
    params.dst = bases[table.memset_memory[row]] + table.memset_offset[row]
    params.value, params.elementSize = memset_value(table, row), table.memset_element[row]
    params.width, params.height, params.pitch = table.memset_width[row], table.memset_height[row], table.memset_pitch[row]
    return params
