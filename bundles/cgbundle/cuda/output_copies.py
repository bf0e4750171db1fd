"""Copies of outputs as nodes of a recording's own graph: a launch is told where they go.

Of a call that gives copies, setting a node's target takes 1.6 us of the CPU; a copy by itself takes 6 (tests/gpu/REPORT.md).
A launch that is told nothing copies nothing: the nodes are switched off, and cost the GPU nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tables.table import Table
from .driver import Context, check, cu
from .libcuda import INVALID_VALUE, MEMORY_TYPE_DEVICE, Memcpy3D

COPIES = 8
"""Outputs of a program that are copied so; of one with more, none is: each is a node to be switched."""


class OutputCopies:
    """The nodes that copy `outputs`, (address, bytes), in a graph whose other nodes are `nodes`; they run behind all of these.

    To run behind the last nodes is enough, as for a copy that is captured behind a recording's last launch: a kernel that begins
    before the one in front of it has ended must wait for that itself (PTX ISA, griddepcontrol).

    `executable` is to be set before the first use.  `on`: whether launches copy, None where a switch failed.  Raises driver-failed.
    """

    __slots__ = ("_context", "_nodes", "_params", "executable", "on")

    def __init__(
        self, context: Context, graph: Any, table: Table, nodes: Sequence[Any], outputs: Sequence[tuple[int, int]]
    ) -> None:
        self._context, self.executable = context.handle, None
        self.on: bool | None = True
        followed = set(table.edge_source)
        last = [node for index, node in enumerate(nodes) if index not in followed]
        self._params = [_copy(address, size) for address, size in outputs]
        self._nodes = []
        for params in self._params:
            added = cu.cuGraphAddMemcpyNode(graph, None, 0, params, self._context)
            node = check("cuGraphAddMemcpyNode", added, f"{table.where}: copies of outputs")
            check("cuGraphAddDependencies", cu.cuGraphAddDependencies(graph, last, [node] * len(last), None), table.where)
            self._nodes.append(node)

    def aim(self, targets: Sequence[int]) -> bool:
        """The next launch copies each output to its target; False where the driver takes no such target: it copies nothing then."""
        if self.on is not True:
            self._switch(True)
        for params, node, target in zip(self._params, self._nodes, targets):  # noqa: B905  as many: asked at every call
            params.dstDevice = target
            error = cu.cuGraphExecMemcpyNodeSetParams(self.executable, node, params, self._context)
            if error:
                self._switch(False)
                if error == INVALID_VALUE:
                    return False
                check("cuGraphExecMemcpyNodeSetParams", error)
        return True

    def off(self) -> None:
        """Launches copy nothing from now on."""
        self._switch(False)

    def without(self, graph: Any) -> Any:
        """A copy of the graph that lacks these nodes; the caller's to destroy."""
        clone = check("cuGraphClone", cu.cuGraphClone(graph))
        try:
            for node in self._nodes:
                found = check("cuGraphNodeFindInClone", cu.cuGraphNodeFindInClone(node, clone))
                check("cuGraphDestroyNode", cu.cuGraphDestroyNode(found))
        except BaseException:
            cu.cuGraphDestroy(clone)
            raise
        return clone

    def _switch(self, on: bool) -> None:
        self.on = None  # where one of the nodes fails
        for node in self._nodes:
            error = cu.cuGraphNodeSetEnabled(self.executable, node, on)
            if error:
                check("cuGraphNodeSetEnabled", error)
        self.on = on


def _copy(address: int, size: int) -> Memcpy3D:
    """Of an output, to itself until a call names a target."""
    params = Memcpy3D()
    params.srcMemoryType = params.dstMemoryType = MEMORY_TYPE_DEVICE
    params.srcDevice = params.dstDevice = address
    params.WidthInBytes = params.srcPitch = params.dstPitch = size
    params.Height = params.Depth = params.srcHeight = params.dstHeight = 1
    return params
