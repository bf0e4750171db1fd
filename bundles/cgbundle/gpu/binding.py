"""Programs bound to the addresses of this process: what a replay calls, one after the other, and the outputs that it gives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from ctypes import c_uint64
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cuda import memory
from ..cuda.driver import check, cu
from ..cuda.graph_executor import GraphExecutor
from ..cuda.launches import CopyingLaunch, Executor, Reader
from ..cuda.memory import HOST, Memories, Output, huge_pages
from ..cuda.modules import Modules
from ..format.schema import MEMORIES, Manifest, Program, Step
from ..format.spans import extent, span
from ..tables.table import Move, Table
from ..validate.state import STATE
from . import host_copies
from .shared import Shared

if TYPE_CHECKING:
    from .host_steps import HostSteps  # few bundles have any


INPUTS = "inputs"


class DeviceOutputs:
    """Outputs in the program's own GPU memory, the same after every replay; it owns the tensors over them."""

    static = True

    def __init__(self, addresses: Sequence[int], device: int | None, copy_out: Callable[[int, int, int], Output]) -> None:
        self.addresses, self.device, self.copy_out = addresses, device, copy_out

    def own(self, index: int) -> None:
        """None: the next replay writes there."""

    def release(self) -> None:
        """Nothing: they stay."""


class HostOutputs:
    """Outputs copied to memory of the CPU that lives as long as this object."""

    device: int | None = None
    static = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [_room(size) for size in sizes]
        self.addresses: Sequence[int] = [ctypes.addressof(memory) for memory in self._memory]

    def release(self) -> None:
        """Nothing: the memory goes with this object."""

    def own(self, index: int) -> object:
        """Each has memory of its own."""
        return self._memory[index]


def _room(size: int) -> ctypes.Array[ctypes.c_char]:
    """New memory; of much of it huge pages, each made when it is first written to, by whichever thread that is."""
    room = ctypes.c_char * max(1, size)
    if size < host_copies.LARGE:
        return room()
    return room.from_buffer(huge_pages(size))


Elsewhere = tuple[tuple[int, int], ...]
"""Inputs that a launch finds elsewhere than in their static buffers: (position, offset in memory arena), by position."""


ALIGNMENT = 256
"""Bytes.  What was recorded is right for static buffers, which are aligned so, and for inputs elsewhere that are."""


class Input:
    """An input of a program: `size` bytes that its launches read `at` an address, which is its static buffer's, `target`, at first.

    `words` are the parameters of `readers` that stand for it: they are set where that is cheaper than a copy, and right.  `own` are
    the session's memories that launches write to, (begin, end): what lies there has to be copied, as it was before the launch.
    """

    __slots__ = ("_own", "_readers", "_words", "at", "size", "target")

    def __init__(
        self,
        target: int,
        size: int,
        readers: Sequence[Reader],
        words: Sequence[tuple[int, c_uint64]],
        own: Sequence[tuple[int, int]],
    ) -> None:
        self.target = self.at = target
        self.size, self._readers, self._words, self._own = size, readers, words, own

    def take(self, address: int, stream: Any) -> None:
        """The next launch finds what lies at `address` of the GPU."""
        if self._readers and not address % ALIGNMENT and not any([begin <= address < end for begin, end in self._own]):
            self._set(address)
            return
        self.restore()
        if address != self.target and self.size:
            error = cu.cuMemcpyDtoDAsync(self.target, address, self.size, stream)
            if error:
                check("cuMemcpyDtoDAsync", error)

    def restore(self) -> None:
        """The next launch finds what lies in the static buffer."""
        if self.at != self.target:
            self._set(self.target)

    def _set(self, address: int) -> None:
        self.at = -1  # where it fails
        for begin, word in self._words:
            word.value = address + begin
        for reader in self._readers:
            reader.give()
        self.at = address


class BoundProgram(NamedTuple):
    """A program with its addresses.  `outputs`: the outputs' addresses; `sizes`: their bytes from the first to the last.

    `chained`: by position of an input, where outputs lie that it may be, as offset in memory arena by address.

    `steps` are functions of the stream in whose order they work; `joins` the same on a stream that is being captured.  `written`:
    (position, address, bytes) of the inputs that the replay changes, which go back to the caller.  `copying`: all steps in one
    launch, which copies the outputs too.
    """

    inputs: list[Input]
    steps: list[Callable[[Any], None]]
    joins: list[Callable[[Any], None]]
    written: list[tuple[int, int, int]]
    outputs: list[int]
    sizes: list[int]
    chained: list[tuple[int, dict[int, int]]]
    copying: CopyingLaunch | None


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

    def is_alone(self, files: Sequence[str]) -> bool:
        """Whether the recordings of a program are one, which no other program has."""
        return len(files) == 1 and files[0] not in self._shared.shared_files

    def copying(self, file: str, outputs: Sequence[tuple[int, int]]) -> CopyingLaunch | None:
        """A launch of the recording that copies its program's outputs, (address, bytes); asked for before the recording is."""
        if file not in self:
            self[file] = self._made(Table(self._shared.bundle.data(file), file), outputs)
        return self[file].copying()

    def moved(self, file: str, moves: tuple[Move, ...]) -> Executor:
        """The recording with memory that lies elsewhere; the same one where it uses none of that."""
        found = self._moved.get((file, moves))
        if found is None:
            table = Table(self._shared.bundle.data(file), file).moved(moves)
            found = self._moved[file, moves] = self[file] if table is None else self._made(table)
        return found

    def _made(self, table: Table, outputs: Sequence[tuple[int, int]] = ()) -> Executor:
        shared, bases = self._shared, self._bases
        executor: Executor
        if shared.mode == "graph":
            executor = GraphExecutor(shared.context, table, self._modules, bases, self._stream, shared.poison, outputs)
        else:
            from ..cuda.stream_executor import StreamExecutor  # what serves launches graphs

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
    arena, inputs = MEMORIES.index("arena"), MEMORIES.index(INPUTS)
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
    entry: Manifest,
    memories: Memories,
    executors: Executors,
    host: HostSteps | None,
    chained: Mapping[int, Mapping[int, int]],
    elsewhere: Elsewhere = (),
) -> BoundProgram:
    """The program at the addresses of `memories`; `entry`: the manifest of its entry, `host` is None for a bundle without host
    regions, `chained` as `Shared` has it.  Raises as `Executors` and `HostSteps.step` do."""
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

    buffers = static_buffers(program, memories)
    rows = [program.values[index] for index in program.outputs]
    outputs = [(memories.address(row.memory, row.offset), span(row)) for row in rows]
    graphs = [step.file for step in program.steps if step.kind == "graph"]
    alone = not chained and not elsewhere and executors.is_alone(graphs)
    direct = alone and len(program.steps) == 1 and not (entry.world or entry.written or entry.aliases)  # its calls may be
    copying = executors.copying(graphs[0], outputs) if direct and all(size for _, size in outputs) else None
    steps, joins = ([made(step, join) for step in program.steps] for join in (False, True))
    readers: Sequence[Reader] = ()
    if alone and _inputs_are_read(program, entry):
        readers = executors[graphs[0]].readers
    return BoundProgram(
        inputs=_inputs(program, buffers, readers, memories),
        steps=steps,
        joins=joins,
        written=[(index, *buffers[index]) for index in entry.written],
        outputs=[address for address, _ in outputs],
        sizes=[size for _, size in outputs],
        chained=[
            (position, {memories.address("arena", offset): offset for offset in places}) for position, places in chained.items()
        ],
        copying=copying,
    )


def _inputs_are_read(program: Program, entry: Manifest) -> bool:
    """Whether recordings are all that touches the inputs, and read them, and no output lies among them."""
    others = [step for step in program.steps if step.kind != "graph"]
    named = [*program.outputs, *[index for step in others for index in (*step.inputs, *step.outputs)]]
    return not entry.written and not entry.aliases and all(program.values[index].memory != INPUTS for index in named)


def _inputs(program: Program, buffers: Sequence[tuple[int, int]], readers: Sequence[Reader], memories: Memories) -> list[Input]:
    """The inputs with the kernels that read them.  A kernel may hold the address behind an input's last byte, where no other input
    begins."""
    rows = [program.values[index] for index in program.inputs]
    begins = {row.offset for row in rows}
    own = [memories.range(name) for name in (INPUTS, "arena", STATE)] if readers else []
    found = []
    for row, (target, size) in zip(rows, buffers, strict=True):
        begin, end = extent(row)
        end += end not in begins
        reading = [reader for reader in readers if any([begin <= offset < end for offset, _ in reader.words])] if size else []
        words = [(offset - row.offset, word) for reader in reading for offset, word in reader.words if begin <= offset < end]
        found.append(Input(target, size, reading, words, own))
    return found


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
