"""Programs bound to the addresses of this process: what a replay calls, one after the other, and the outputs that it gives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..format.schema import MEMORIES, Program, Step
from ..format.spans import extent, span
from ..tables.table import Move, Table
from . import memory
from .graph_executor import GraphExecutor
from .launches import Executor
from .memory import HOST, Memories, Output
from .modules import Modules
from .shared import Shared

if TYPE_CHECKING:
    from .host_steps import HostSteps  # few bundles have any


class DeviceOutputs:
    """Outputs in the program's own GPU memory, the same after every replay; it owns the tensors over them."""

    static = True

    def __init__(self, addresses: Sequence[int], device: int | None, copy_out: Callable[[int, int, int], Output]) -> None:
        self.addresses, self.device, self.copy_out = addresses, device, copy_out


class HostOutputs:
    """Outputs copied to memory of the CPU that lives as long as this object."""

    device: int | None = None
    static = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [(ctypes.c_char * max(1, size))() for size in sizes]
        self.addresses: Sequence[int] = [ctypes.addressof(memory) for memory in self._memory]


Elsewhere = tuple[tuple[int, int], ...]
"""Inputs that a launch finds elsewhere than in their static buffers: (position, offset in memory arena), by position."""


class BoundProgram(NamedTuple):
    """A program with its addresses.  `inputs`: (address, bytes) of each input's static buffer; `outputs`: the outputs'
    addresses; `sizes`: their bytes from the first to the last.

    `chained`: by position of an input, where outputs lie that it may be, as offset in memory arena by address.

    `steps` are functions of the stream in whose order they work; `joins` the same on a stream that is being captured.  `written`:
    (position, address, bytes) of the inputs that the replay changes, which go back to the caller.
    """

    inputs: list[tuple[int, int]]
    steps: list[Callable[[Any], None]]
    joins: list[Callable[[Any], None]]
    written: list[tuple[int, int, int]]
    outputs: list[int]
    sizes: list[int]
    chained: list[tuple[int, dict[int, int]]]


class Executors(dict[str, Executor]):
    """The recordings by the file of their table, each made ready at its first use, which must be inside the context.

    `bases` are the addresses of a session's memories, `stream` is for what making one needs.  Raises table-invalid, file-damaged,
    driver-failed, OutOfMemory.
    """

    def __init__(self, shared: Shared, modules: Modules, bases: Sequence[int], stream: Any) -> None:
        super().__init__()
        self._shared, self._modules, self._bases, self._stream = shared, modules, bases, stream
        self._moved: dict[tuple[str, tuple[Move, ...]], Executor] = {}

    def __missing__(self, file: str) -> Executor:
        self[file] = executor = self._made(Table(self._shared.bundle.data(file), file))
        return executor

    def moved(self, file: str, moves: tuple[Move, ...]) -> Executor:
        """The recording with memory that lies elsewhere; the same one where it uses none of that."""
        found = self._moved.get((file, moves))
        if found is None:
            table = Table(self._shared.bundle.data(file), file).moved(moves)
            found = self._moved[file, moves] = self[file] if table is None else self._made(table)
        return found

    def _made(self, table: Table) -> Executor:
        shared, bases = self._shared, self._bases
        executor: Executor
        if shared.mode == "graph":
            executor = GraphExecutor(shared.context, table, self._modules, bases, self._stream, shared.poison)
        else:
            from .stream_executor import StreamExecutor  # what serves launches graphs

            executor = StreamExecutor(table, self._modules, bases, shared.poison)
        return executor

    def close(self) -> None:
        """Gives the driver's objects back, the others' too when one fails."""
        with ExitStack() as each:
            for executor in {id(executor): executor for executor in (*self.values(), *self._moved.values())}.values():
                each.callback(executor.close)
            self.clear()
            self._moved.clear()


def with_inputs_at(program: Program, places: Elsewhere) -> tuple[Program, tuple[Move, ...]]:
    """The program with inputs in memory arena, and what its recordings find elsewhere.

    A kernel may hold the address behind an input's last byte.  It moves along where no other input begins there.
    """
    arena, inputs = MEMORIES.index("arena"), MEMORIES.index("inputs")
    begins = {program.values[index].offset for index in program.inputs}
    values, moves = list(program.values), []
    for position, offset in places:
        index = program.inputs[position]
        begin, end = extent(values[index])
        moves.append(Move(inputs, begin, end + (end not in begins), arena, offset))
        values[index] = replace(values[index], memory="arena", offset=offset)
    return replace(program, values=tuple(values)), tuple(moves)


def bind(
    program: Program,
    written: Sequence[int],
    memories: Memories,
    executors: Executors,
    host: HostSteps | None,
    chained: Mapping[int, Mapping[int, int]],
    elsewhere: Elsewhere = (),
) -> BoundProgram:
    """The program at the addresses of `memories`; `written` are the positions of the inputs that it writes to, `host` is None for
    a bundle without host regions, `chained` as `Shared` has it.  Raises as `Executors` and `HostSteps.step` do."""
    moves: tuple[Move, ...] = ()
    if elsewhere:
        program, moves = with_inputs_at(program, elsewhere)

    def made(step: Step, join: bool) -> Callable[[Any], None]:
        if step.kind == "graph":
            executor = executors.moved(step.file, moves) if moves else executors[step.file]
            return executor.join if join else executor.launch
        if step.kind == "copy":
            return _copy_step(program, step, memories)
        assert host is not None  # a host step's region is of kind host, and so there are host regions
        return host.step(program, step)

    inputs = static_buffers(program, memories)
    outputs = [program.values[index] for index in program.outputs]
    steps, joins = ([made(step, join) for step in program.steps] for join in (False, True))
    return BoundProgram(
        inputs=inputs,
        steps=steps,
        joins=joins,
        written=[(index, *inputs[index]) for index in written],
        outputs=[memories.address(value.memory, value.offset) for value in outputs],
        sizes=[span(value) for value in outputs],
        chained=[
            (position, {memories.address("arena", offset): offset for offset in places}) for position, places in chained.items()
        ],
    )


def static_buffers(program: Program, memories: Memories) -> list[tuple[int, int]]:
    """(address, bytes) of the static buffer of each input."""
    rows = [program.values[index] for index in program.inputs]
    return [(memories.address(row.memory, row.offset), span(row)) for row in rows]


def _copy_step(program: Program, step: Step, memories: Memories) -> Callable[[Any], None]:
    """The two values are laid out alike, which the verifier checks."""
    source, target = program.values[step.inputs[0]], program.values[step.outputs[0]]
    start, end = memories.address(source.memory, source.offset), memories.address(target.memory, target.offset)
    size, out, into = span(source), source.memory != HOST, target.memory != HOST
    return lambda stream: memory.copy(end, start, size, stream, target_on_device=into, source_on_device=out)
