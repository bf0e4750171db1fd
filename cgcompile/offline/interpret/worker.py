"""A worker process that interprets one int_key (see `util.workers`); the request is a `Task`.  TRITON_INTERPRET=1 must be set by
the parent, because `triton.jit` reads it when Triton and Inductor's helpers are imported."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from cgbundle.format import safetensors
from cgbundle.format.schema import DTYPES, HOST, MEMORIES, Value
from cgbundle.format.shapes import span
from cgbundle.validate.module_state import Address
from cgcompile.bundle.recordings import ConditionalNode, EmptyNode, Function, KernelNode, MemcpyNode, MemsetNode, Recording

from ...errors import BuildError
from ...targets.collectives.exchange_nodes import transfer_of
from ...targets.kernels.fills import memset_of
from ...util.workers import serve
from ..assemble.block_reader import arguments, check_order, programs
from . import front_end, libdevice
from .builder import Builder
from .exchanges import Steps, exchange, run_ranks
from .interpret import Outcome, Task
from .launch import launch
from .memory import Memory
from .values import Array

MAX_ITERATIONS = 1 << 20
"""The number of iterations after which a loop counts as endless."""


def execute(task: Task) -> Outcome:
    """Runs all stages in order, for all ranks together.  Call it once per process, because it replaces parts of Triton."""
    ranks = (task, *task.others)
    memories = []
    for rank in ranks:
        for recording in rank.recordings:
            check_order(recording)
        memories.append(Memory(rank.sizes))
        memories[-1].where = f"int_key {rank.key}"
        _fill(memories[-1], rank)
    builder, control_flow = front_end.install(memories[0])
    libdevice.install(builder, control_flow.semantic)
    kernels = [_Kernels(memory, rank, builder, control_flow) for memory, rank in zip(memories, ranks, strict=True)]
    began = time.monotonic()
    read = run_ranks([_stages(memory, table, rank) for memory, table, rank in zip(memories, kernels, ranks, strict=True)], task.key)
    seconds = time.monotonic() - began
    first, *others = [Outcome(key=tuple(task.key), read=tuple(contents), seconds=seconds) for contents in read]
    return replace(first, others=tuple(others))


def _stages(memory: Memory, kernels: _Kernels, task: Task) -> Steps[list[bytes]]:
    """Runs the stages of one rank and returns the contents that it reads."""
    read: list[bytes] = []
    for stage in task.stages:
        memory.where = f"the copy to the inputs of int_key {task.key}"
        for value, contents in stage.inputs:
            view = _view(memory, value, "writes")
            view[...] = np.frombuffer(contents, view.dtype).reshape(view.shape)
        if stage.recording:
            yield from _run(memory, kernels, stage.recording)
        memory.where = f"the copy of the outputs of int_key {task.key}"
        read += [_view(memory, value, "reads").tobytes() for value in stage.read]
    return read


def _run(memory: Memory, kernels: _Kernels, recording: Recording) -> Steps[None]:
    begins = [0, *recording.bodies, len(recording.nodes)]
    conditionals = [row for row, node in enumerate(recording.nodes) if isinstance(node, ConditionalNode)]
    conditions: dict[int, int] = {}

    def run(graph: int) -> Steps[None]:
        for row in range(begins[graph], begins[graph + 1]):
            match recording.nodes[row]:
                case KernelNode(handles=(handle,)) as node:
                    memory.where = f"condition, row {row}"
                    target = node.relocations[0].target
                    conditions[conditionals[handle.conditional]] = int(memory.span(target.memory, target.offset, 1)[0])
                case ConditionalNode(type="while", bodies=(body,)):
                    for iteration in count():
                        if not conditions[row]:
                            break
                        if iteration == MAX_ITERATIONS:
                            raise BuildError(
                                "proof-failed", f"the loop of row {row} has not ended after {MAX_ITERATIONS} iterations"
                            )
                        yield from run(body + 1)
                case ConditionalNode(type=kind, bodies=bodies):
                    chosen = conditions[row] if kind == "switch" else int(not conditions[row])
                    for body in bodies[chosen : chosen + 1]:
                        yield from run(body + 1)
                case KernelNode() as node if (fill := memset_of(recording.functions[node.function], node)) is not None:
                    _memset(memory, fill, f"memset, row {row}")
                case KernelNode() as node if (sent := transfer_of(recording.functions[node.function], node)) is not None:
                    memory.where = f"collective, row {row}"
                    yield from exchange(memory, sent, node)
                case KernelNode() as node:
                    kernels.launch(row, recording.functions[node.function], node)
                case MemsetNode() as node:
                    _memset(memory, node, f"memset, row {row}")
                case MemcpyNode() as node:
                    _memcpy(memory, node, f"memcpy, row {row}")
                case EmptyNode():
                    pass

    yield from run(0)


class _Kernels:
    """Launches the kernels of one rank, and executes the source of each kernel only once.  `widest`: for each kernel, the result of
    its last `launch`.  `builder`: all ranks share it, so its memory is set before each launch."""

    def __init__(self, memory: Memory, task: Task, builder: Builder, control_flow: front_end.ControlFlow) -> None:
        self.memory = memory
        self.task = task
        self.variants = dict(task.variants)
        self.functions: dict[tuple[str, str], Callable[..., Any]] = {}
        self.widest: dict[tuple[str, str], int] = {}
        self.builder, self.control_flow = builder, control_flow

    def launch(self, row: int, function: Function, node: KernelNode) -> None:
        image_symbol = function.image, function.symbol
        where = f"kernel {function.symbol}, row {row} of int_key {self.task.key}"
        if image_symbol not in self.variants:
            raise BuildError("function-not-interpretable", f"{where}: the interpreter has no source of image {function.image[:12]}")
        variant = self.variants[image_symbol]
        if image_symbol not in self.functions:
            self.functions[image_symbol] = front_end.function_of(variant.source, variant.name, self.control_flow)
        self.memory.where = where
        self.builder.memory = self.memory
        kinds = dict(variant.signature)
        parameters: dict[str, Any] = dict(variant.constants)
        for name, value in arguments(variant, function, node).items():
            if isinstance(value, Address):
                value = self.memory.address(value.memory, value.offset)
            parameters[name] = front_end.argument(value or 0, kinds[name])
        widest = self.widest.get(image_symbol, 0)
        self.widest[image_symbol] = launch(self.builder, self.functions[image_symbol], parameters, programs(node), where, widest)


def _fill(memory: Memory, task: Task) -> None:
    """Loads the weights and the initial state, but not weights that only the host reads.  All other memory keeps the poison."""
    for path, placed in task.weights:
        for row in [row for row in placed if row.zeros]:
            memory.span(MEMORIES.index(row.memory), row.offset, span(row), "writes")[...] = 0
        stored = {(row.tensor, row.memory, row.offset) for row in placed if row.memory != HOST and not row.zeros}
        with open(path, "rb") as file:
            entries = safetensors.read_header(file, path.name)
            for tensor, name, offset in stored:
                entry = entries[tensor]
                place = memory.span(MEMORIES.index(name), offset, entry.end - entry.begin, "writes")
                file.seek(entry.begin)
                file.readinto(memoryview(place))  # type: ignore[arg-type]


def _view(memory: Memory, value: Value, verb: str) -> Array:
    """A view of a tensor in memory, with untyped elements of its dtype's size."""
    item = DTYPES[value.dtype]
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True))
    nbytes = (last + 1) * item if all(value.shape) else 0
    flat: Array = memory.span(MEMORIES.index(value.memory), value.offset, nbytes, verb).view(f"V{item}")
    return np.lib.stride_tricks.as_strided(flat, value.shape, [stride * item for stride in value.strides])


def _memset(memory: Memory, node: MemsetNode, where: str) -> None:
    memory.where = where
    pattern = np.frombuffer(node.value.to_bytes(8, "little")[: node.element], np.uint8)
    for line in range(node.height):
        at = node.target.offset + line * node.pitch
        content = memory.span(node.target.memory, at, node.width * node.element, "writes")
        content.reshape(node.width, node.element)[...] = pattern


def _memcpy(memory: Memory, node: MemcpyNode, where: str) -> None:
    memory.where = where
    for layer in range(node.depth):
        for line in range(node.height):
            source = node.source.offset + (layer * node.source_height + line) * node.source_pitch
            target = node.target.offset + (layer * node.target_height + line) * node.target_pitch
            content = memory.span(node.source.memory, source, node.width, "reads").copy()
            memory.span(node.target.memory, target, node.width, "writes")[...] = content


if __name__ == "__main__":
    serve(execute)
