"""Launches a table row by row on a stream, for debugging, profiling baselines and tests. Sequential order is correct: a
programmatic edge only allows an earlier start. Before a branch or loop the condition's byte is copied to the host, which waits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CallError
from ..format.table import CONDITIONAL, IF, KERNEL, MEMCPY, MEMSET, WHILE, Table, launch_order
from .driver import call, check, cu
from .kernels import Launches, Modules, Reader, attributes, copy_params, describe, memset_value, rows
from .structures import LaunchAttribute, LaunchConfig

Step = Callable[[Any], None]  # enqueues a row on a stream


class StreamExecutor:
    """A recording launched row by row. Raises table-invalid, driver-failed, OutOfMemory."""

    __slots__ = ("_launches", "_steps", "_where")

    readers: Sequence[Reader] = ()

    def __init__(self, table: Table, modules: Modules, bases: Sequence[int], poison: int | None = None) -> None:
        self._where = table.where if table.counts["conditionals"] else ""
        self._launches = Launches(table, modules, bases, poison)  # the driver reads the blocks at every launch
        conditions = [0] * table.counts["conditionals"]
        setters = dict(zip(table.handle_kernel, table.handle_conditional, strict=True))
        graphs: list[list[Step]] = [[] for _ in table.spans()]
        steps: list[Step | None] = []
        for position, (kind, row) in enumerate(rows(table)):
            where = describe(table, position, kind, row)
            if kind == KERNEL and row in setters:
                steps.append(_condition_step(table, row, bases, conditions, setters[row]))
            elif kind == KERNEL:
                steps.append(_kernel_step(table, row, self._launches, where))
            elif kind == MEMSET:
                steps.append(_memset_step(table, row, bases, where))
            elif kind == MEMCPY:
                steps.append(_memcpy_step(copy_params(table, row, bases), where))
            elif kind == CONDITIONAL:
                bodies = [graphs[body + 1] for body in table.conditional_body[slice(*table.conditional_bounds[row : row + 2])]]
                steps.append(_conditional_step(bodies, table.conditional_type[row], conditions, row))
            else:
                steps.append(None)
        for position in launch_order(table):
            if (step := steps[position]) is not None:
                graphs[table.graph(position)].append(step)
        self._steps = graphs[0]

    def launch(self, stream: Any) -> None:
        """Asynchronous, but returns after the last condition is known."""
        for step in self._steps:
            step(stream)

    def copying(self) -> None:
        """None: only graphs copy outputs."""

    def join(self, stream: Any) -> None:
        """Launches into a capture. Raises capture-refused for conditions."""
        if self._where:
            raise CallError(
                "capture-refused",
                f"{self._where}: mode 'stream' reads the branch from the device, which is not allowed in a capture",
                "load the bundle with mode='graph'",
            )
        self.launch(stream)

    def close(self) -> None:
        self._steps = []


def _condition_step(table: Table, row: int, bases: Sequence[int], conditions: list[int], number: int) -> Step:
    first = table.relocation_bounds[row]
    address = bases[table.relocation_memory[first]] + table.relocation_offset[first]
    byte = ctypes.c_uint8()

    def step(stream: Any) -> None:
        call("cuMemcpyDtoHAsync", ctypes.addressof(byte), address, 1, stream)
        call("cuStreamSynchronize", stream)
        conditions[number] = byte.value

    return step


def _conditional_step(bodies: Sequence[list[Step]], kind: int, conditions: list[int], number: int) -> Step:
    """`bodies` are filled later."""

    def step(stream: Any) -> None:
        chosen = int(not conditions[number]) if kind == IF else conditions[number]
        while kind == WHILE and conditions[number]:
            for launch in bodies[0]:
                launch(stream)
        for launch in bodies[chosen] if kind != WHILE and chosen < len(bodies) else ():
            launch(stream)

    return step


def _kernel_step(table: Table, row: int, launches: Launches, where: str) -> Callable[[Any], None]:
    config = LaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = table.grid_x[row], table.grid_y[row], table.grid_z[row]
    config.blockDimX, config.blockDimY, config.blockDimZ = table.threads_x[row], table.threads_y[row], table.threads_z[row]
    config.sharedMemBytes = table.shared[row]
    listed = [LaunchAttribute(id=number, value=value) for number, value in attributes(table, row)]
    config.attrs, config.numAttrs = (LaunchAttribute * len(listed))(*listed), len(listed)
    function, params = launches.functions[table.function[row]], launches.params[row]

    def step(stream: Any) -> None:
        config.hStream = stream
        call("cuLaunchKernelEx", config, function, params, None, detail=where)

    return step


def _memset_step(table: Table, row: int, bases: Sequence[int], where: str) -> Callable[[Any], None]:
    element, value, width = table.memset_element[row], memset_value(table, row), table.memset_width[row]
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
        call("cuMemcpy3DAsync", params, stream, detail=where)

    return step
