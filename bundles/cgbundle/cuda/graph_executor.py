"""The rows of a table as one CUDA graph: one driver call per run, whatever the number of nodes.

Conditional nodes are nodes of the driver's own, whose bodies are graphs that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..tables.column_file import invalid
from ..tables.table import CONDITIONAL, KERNEL, MEMCPY, MEMSET, Table
from .driver import Context, check, cu
from .launches import INPUTS, CopyingLaunch, Launches, Reader, attributes, copy_params, describe, memset_value, rows
from .libcuda import (
    CONDITION_IF,
    CONDITION_SWITCH,
    CONDITION_WHILE,
    INSTANTIATE_USE_NODE_PRIORITY,
    NODE_TYPE_CONDITIONAL,
    SET_CAPTURE_DEPENDENCIES,
    ConditionalNodeParams,
    EdgeData,
    KernelNodeParams,
    MemsetNodeParams,
)
from .modules import Modules
from .output_copies import COPIES, OutputCopies

PRIORITY = 8
"""A launch attribute with a meaning beyond its value."""

READERS = 6
"""Kernels whose parameters are set for an input rather than the input copied: 0.8 us each against 6 (tests/gpu/REPORT.md)."""


class GraphExecutor:
    """A recording as one executable CUDA graph of the context.  Raises table-invalid, driver-failed, OutOfMemory.

    `outputs`: what the launch of `copying` copies, (address, bytes).
    """

    __slots__ = ("_build", "_copies", "_exec", "_graph", "readers")

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
        graph = check("cuGraphCreate", cu.cuGraphCreate(0))
        try:
            nodes = build.into(graph)
            copied = 0 < len(outputs) <= COPIES and not table.counts["conditionals"]
            self._copies = OutputCopies(context, graph, table, nodes, outputs) if copied else None
            priorities = PRIORITY in table.attribute_id.tolist()
            flags = INSTANTIATE_USE_NODE_PRIORITY if priorities else 0
            self._exec = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, flags), table.where)
        except BaseException:
            cu.cuGraphDestroy(graph)
            raise
        self._build = build if table.counts["conditionals"] else None
        self._graph = graph  # the executable one holds copies of everything; this one is for `join`
        try:
            self.readers: Sequence[Reader] = build.readers(nodes, self._exec)
            if self._copies is not None:
                self._copies.executable = self._exec
                self._copies.off()
            check("cuGraphUpload", cu.cuGraphUpload(self._exec, stream), table.where)
        except BaseException:
            self.close()
            raise

    def launch(self, stream: Any) -> None:
        """Runs the recording in the order of the stream; returns before it is done."""
        copies = self._copies
        if copies is not None and copies.on is not False:
            copies.off()
        error = cu.cuGraphLaunch(self._exec, stream)
        if error:
            check("cuGraphLaunch", error)

    def copying(self) -> CopyingLaunch | None:
        copies, executable = self._copies, self._exec
        if copies is None:
            return None

        def launch(targets: Sequence[int], stream: Any) -> bool:
            if not copies.aim(targets):
                return False
            error = cu.cuGraphLaunch(executable, stream)
            if error:
                check("cuGraphLaunch", error)
            return True

        return launch

    def join(self, stream: Any) -> None:
        """Adds the recording to the graph that is being captured on the stream, behind what is there: as a child graph, which one
        with conditional nodes cannot be, or node by node.  (An executable graph cannot be launched into a capture:
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.)"""
        graph, nodes = check("cuStreamGetCaptureInfo", cu.cuStreamGetCaptureInfo(stream))
        if self._build is not None:
            last = self._build.behind(graph, nodes)
        elif self._copies is not None:
            own = self._copies.without(self._graph)
            try:
                last = [check("cuGraphAddChildGraphNode", cu.cuGraphAddChildGraphNode(graph, nodes, own))]
            finally:
                cu.cuGraphDestroy(own)
        else:
            last = [check("cuGraphAddChildGraphNode", cu.cuGraphAddChildGraphNode(graph, nodes, self._graph))]
        answer = cu.cuStreamUpdateCaptureDependencies(stream, last, SET_CAPTURE_DEPENDENCIES)
        check("cuStreamUpdateCaptureDependencies", answer)

    def close(self) -> None:
        """Destroys the graphs; a run in flight finishes first."""
        cu.cuGraphDestroy(self._graph)
        check("cuGraphExecDestroy", cu.cuGraphExecDestroy(self._exec))


class _Build:
    """How a table's nodes and edges get into a graph."""

    __slots__ = ("_bases", "_context", "_kernel_params", "_launches", "_rows", "_spans", "_table")

    def __init__(self, context: Context, table: Table, launches: Launches, bases: Sequence[int]) -> None:
        self._context, self._table, self._launches, self._bases = context, table, launches, bases
        self._kernel_params = _kernel_params(table, launches)
        self._rows, self._spans = list(rows(table)), table.spans()

    def into(self, graph: Any) -> list[Any]:
        """Adds everything to a graph; returns the nodes, those of bodies too."""
        nodes: list[Any] = []
        graphs = [graph]  # and the bodies: a body's graph is made with the conditional node, which stands in an earlier one
        for number, (begin, end) in enumerate(self._spans):
            if number == len(graphs):
                raise invalid(f"{self._table.where}: bodies", f"body {number - 1} belongs to no node before it")
            own = self._rows[begin:end]
            handles = {row: self._handle(graphs[number], row) for kind, row in own if kind == CONDITIONAL}
            for kind, row in own:
                if kind == CONDITIONAL:
                    node, bodies = self._conditional(graphs[number], row, handles[row], len(nodes))
                    nodes.append(node)
                    graphs += bodies
                else:
                    nodes.append(self._add(graphs[number], kind, row, len(nodes)))
        _connect(graphs, self._table, nodes)
        return nodes

    def readers(self, nodes: Sequence[Any], executable: Any) -> list[Reader]:
        """Of the executable graph; none where a copy or a body takes part, whose parameters are not set here, or too many do."""
        table = self._table
        if table.counts["conditionals"] or INPUTS in table.memcpy_memory.tolist():
            return []
        found = [row for row in range(table.counts["kernels"]) if self._reads(row)]
        if len(found) > READERS:
            return []
        positions = [position for position, (kind, _) in enumerate(self._rows) if kind == KERNEL]
        fill = [_kernel_params(table, self._launches)(row) for row in found]
        rows = zip(found, fill, strict=True)
        return [Reader(table, row, self._launches, params, _setter(executable, nodes[positions[row]])) for row, params in rows]

    def _reads(self, row: int) -> bool:
        table = self._table
        return INPUTS in table.relocation_memory[slice(*table.relocation_bounds[row : row + 2])].tolist()

    def behind(self, graph: Any, after: Sequence[Any]) -> list[Any]:
        """Adds everything to a graph, behind the nodes `after`; returns the nodes that none of it waits for."""
        nodes, main = self.into(graph), range(*self._spans[0])
        waiting, leading = set(self._table.edge_target), set(self._table.edge_source)
        pairs = [(source, nodes[index]) for source in after for index in main if index not in waiting]
        if pairs:
            sources, targets = [list(each) for each in zip(*pairs, strict=True)]
            answer = cu.cuGraphAddDependencies(graph, sources, targets, None)
            check("cuGraphAddDependencies", answer, self._table.where)
        return [nodes[index] for index in main if index not in leading]

    def _add(self, graph: Any, kind: int, row: int, position: int) -> Any:
        table = self._table
        if kind == KERNEL:
            call, result = "cuGraphAddKernelNode", cu.cuGraphAddKernelNode(graph, None, 0, self._kernel_params(row))
        elif kind == MEMSET:
            fill = _memset_params(table, row, self._bases)
            call, result = "cuGraphAddMemsetNode", cu.cuGraphAddMemsetNode(graph, None, 0, fill, self._context.handle)
        elif kind == MEMCPY:
            copied = copy_params(table, row, self._bases)
            call, result = "cuGraphAddMemcpyNode", cu.cuGraphAddMemcpyNode(graph, None, 0, copied, self._context.handle)
        else:
            call, result = "cuGraphAddEmptyNode", cu.cuGraphAddEmptyNode(graph, None, 0)
        if result[0]:
            check(call, result, describe(table, position, kind, row))
        node = result[1]
        if kind == KERNEL and table.attribute_bounds[row] != table.attribute_bounds[row + 1]:
            for number, value in attributes(table, row):
                answer = cu.cuGraphKernelNodeSetAttribute(node, number, value)
                check("cuGraphKernelNodeSetAttribute", answer, f"attribute {number}, {describe(table, position, kind, row)}")
        return node

    def _handle(self, graph: Any, row: int) -> Any:
        """The handle of a conditional node that the graph will have, which its kernels are given."""
        answer = cu.cuGraphConditionalHandleCreate(graph, self._context.handle, 0, 0)
        handle = check("cuGraphConditionalHandleCreate", answer, self._table.where)
        self._launches.give_handle(row, int(handle))
        return handle

    def _conditional(self, graph: Any, row: int, handle: Any, position: int) -> tuple[Any, list[Any]]:
        """The node, and the empty graphs of its bodies."""
        params = ConditionalNodeParams(type=NODE_TYPE_CONDITIONAL)
        params.conditional.handle = handle
        types = CONDITION_IF, CONDITION_WHILE, CONDITION_SWITCH
        params.conditional.type = types[self._table.conditional_type[row]]
        first, last = self._table.conditional_bounds[row : row + 2]
        params.conditional.size = last - first
        params.conditional.ctx = self._context.handle
        where = describe(self._table, position, CONDITIONAL, row)
        node = check("cuGraphAddNode", cu.cuGraphAddConditionalNode(graph, None, 0, params), where)
        return node, params.conditional.phGraph_out[: last - first]


def _setter(executable: Any, node: Any) -> Callable[[KernelNodeParams], None]:
    """Sets the parameters of a kernel of an executable graph."""

    def give(params: KernelNodeParams) -> None:
        error = cu.cuGraphExecKernelNodeSetParams(executable, node, params)
        if error:
            check("cuGraphExecKernelNodeSetParams", error)

    return give


def _kernel_params(table: Table, launches: Launches) -> Callable[[int], Any]:
    """Fills one parameter object for kernel after kernel: the driver copies it when a node is added."""
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


def _connect(graphs: Sequence[Any], table: Table, nodes: list[Any]) -> None:
    """Adds the edges, those of each graph apart."""
    if not table.counts["edges"]:
        return
    data = None
    if any(table.edge_type) or any(table.edge_from_port) or any(table.edge_to_port):
        data = []
        for out, into, kind in zip(table.edge_from_port, table.edge_to_port, table.edge_type, strict=True):
            data.append(EdgeData(from_port=out, to_port=into, type=kind))
    sources, targets = ([nodes[index] for index in ends] for ends in (table.edge_source, table.edge_target))
    if len(graphs) == 1:
        answer = cu.cuGraphAddDependencies(graphs[0], sources, targets, data)
        check("cuGraphAddDependencies", answer, table.where)
        return
    edges: list[list[int]] = [[] for _ in graphs]
    for row, source in enumerate(table.edge_source):
        edges[table.graph(source)].append(row)
    for graph, own in zip(graphs, edges, strict=True):
        ends = [[each[row] for row in own] for each in (sources, targets)]
        among = None if data is None else [data[row] for row in own]
        if own:
            check("cuGraphAddDependencies", cu.cuGraphAddDependencies(graph, *ends, among), table.where)
