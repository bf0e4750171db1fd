"""The programs of a session, each bound to memory addresses when first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cuda import memory
from ..cuda.driver import Relaxed, call, check, cu
from ..cuda.graph_executor import GraphExecutor
from ..cuda.kernels import CopyingLaunch, Modules, Reader
from ..cuda.memory import HOST, Memories, Output
from ..errors import CallError
from ..format.schema import STATE, EntrySpec, Program, Step
from ..format.shapes import extent, span
from ..format.table import Table
from .device_bundle import DeviceBundle
from .streams import DeviceOutputs, HostCopies, HostOutputs, StreamOrder

if TYPE_CHECKING:
    from ..call.profile import Profile
    from ..cuda.stream_executor import StreamExecutor
    from .host_steps import HostSteps
    from .moves import Move, Places
    from .step_times import StepClock

INPUTS = "inputs"

ALIGNMENT = 256  # bytes: recordings are valid for static buffers, and for other inputs with this alignment


class Input:
    """An input of `size` bytes that launches read `at` an address, at first its static buffer `target`. `words`: parameters of
    `readers` with this address, which are set instead of a copy if possible. `written`: (begin, end) of memories that launches
    write; an input inside is copied before the launch."""

    __slots__ = ("_readers", "_words", "_written", "at", "size", "target")

    def __init__(
        self, target: int, size: int, readers: Sequence[Reader], words: Sequence[tuple[int, c_uint64]],
        written: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.target = self.at = target
        self.size, self._readers, self._words, self._written = size, readers, words, written

    def take(self, address: int, stream: Any) -> None:
        if self._readers and not address % ALIGNMENT and not any([begin <= address < end for begin, end in self._written]):
            self._set(address)
            return
        self.restore()
        if address != self.target and self.size:
            error = cu.cuMemcpyDtoDAsync(self.target, address, self.size, stream)
            if error:
                check("cuMemcpyDtoDAsync", error)

    def restore(self) -> None:
        if self.at != self.target:
            self._set(self.target)

    def _set(self, address: int) -> None:
        self.at = -1  # in case a call fails
        for begin, word in self._words:
            word.value = address + begin
        for reader in self._readers:
            reader.set()
        self.at = address


class Executors(dict[tuple[str, "tuple[Move, ...]"], "GraphExecutor | StreamExecutor"]):
    """Executors by file of the table and by moves of memory."""

    def close(self) -> None:
        with ExitStack() as closing:
            for executor in {id(executor): executor for executor in self.values()}.values():
                closing.callback(executor.close)
            self.clear()


class BoundProgram(NamedTuple):
    """A program with its addresses. `results`: outputs; `sizes`: their bytes. `steps`: functions of a stream; `joins`: the same for
    a captured stream. `written`: (position, address, bytes) of mutated inputs. `copying`: all steps in one launch that also copies
    outputs. `donated`: (input position, {address of a donated output: offset in memory arena})."""

    inputs: list[Input]
    steps: list[Callable[[Any], None]]
    joins: list[Callable[[Any], None]]
    written: list[tuple[int, int, int]]
    results: DeviceOutputs
    sizes: list[int]
    donated: list[tuple[int, dict[int, int]]]
    copying: CopyingLaunch | None

    def replay(self, addresses: Sequence[int], stream: Any) -> None:
        for address, place in zip(addresses, self.inputs):  # noqa: B905  equal lengths: a check costs 0.1 us per call
            if address != place.at:
                place.take(address, stream)
        for step in self.steps:
            step(stream)

    def join(self, addresses: Sequence[int], stream: Any) -> None:
        """Adds the call to a caller's capture. Inputs are copied, because the capture outlives them."""
        for address, place in zip(addresses, self.inputs, strict=True):
            if address != place.target:
                memory.copy(place.target, address, place.size, stream)
        for step in self.joins:
            step(stream)

    def replay_from_host(self, addresses: Sequence[int], copies: HostCopies, stream: Any, *, captured: bool) -> HostOutputs:
        """Replays on inputs on the CPU: copies them to the GPU and the outputs back, and waits."""
        for address, place in zip(addresses, self.inputs, strict=True):
            place.restore()
            copies.to_device(place.target, address, place.size, stream)
        for step in self.joins if captured else self.steps:
            step(stream)
        results = HostOutputs(self.sizes)
        for target, source, size in zip(results.addresses, self.results.addresses, self.sizes, strict=True):
            copies.to_host(target, source, size, stream)
        call("cuStreamSynchronize", stream)
        if self.written:
            for index, source, size in self.written:
                copies.to_host(addresses[index], source, size, stream)
            call("cuStreamSynchronize", stream)
        return results


class Programs:
    """The programs of `shared` over a session's memories, by number. `ready`: bound ones. `late`: a call may come before its
    program is bound, and is refused inside a capture. `copy_out` as for `DeviceOutputs`. Needs the current context. Raises
    table-invalid, file-damaged, driver-failed, OutOfMemory, and as `HostSteps.step`."""

    def __init__(
        self, shared: DeviceBundle, memories: Memories, modules: Modules, executors: Executors, host: HostSteps | None,
        order: StreamOrder, copy_out: Callable[[int, int, int], Output], *, late: bool,
    ) -> None:  # fmt: skip
        self._shared, self._memories, self._modules, self._host = shared, memories, modules, host
        self._order, self._copy_out, self._late = order, copy_out, late
        self.ready: dict[int, BoundProgram] = {}
        self._executors = executors
        self._elsewhere: dict[tuple[int, Places], BoundProgram] = {}  # programs over donated inputs
        self._unwatched: dict[int, BoundProgram] = {}
        self._clock: StepClock | None = None

    @property
    def watched(self) -> bool:
        return self._clock is not None

    def bind(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            bound = self._bound(number)
            if self._clock is not None:
                self._unwatched[number], bound = bound, self._timed(number, bound)
            self.ready[number] = bound

    def bind_donated(self) -> None:
        """Binds every program over all inputs that one program of another entry may donate; other combinations are bound at their
        first call."""
        for number, places in self._donations():
            self.bind_one(number, places)

    def unbound(self) -> list[tuple[int, Places]]:
        """Arguments of `bind_one` for programs that can be bound before a call."""
        return [*[(number, ()) for number in range(len(self._shared.programs))], *self._donations()]

    def bind_one(self, number: int, places: Places) -> None:
        if places and (number, places) not in self._elsewhere:
            self._bind_elsewhere(number, places)
        elif not places and number not in self.ready:
            self.bind((number,))

    def first_used(self, number: int, stream: Any) -> BoundProgram:
        """A program at its first use. Raises capture-refused inside a caller's capture."""
        self._refuse_late(number, stream)
        with Relaxed():
            self.bind((number,))
        return self.ready[number]

    def over_donated(self, number: int, bound: BoundProgram, addresses: Sequence[int], stream: Any) -> BoundProgram:
        """The program with donated inputs in place. Raises as `first_used`."""
        offsets = [(position, places.get(addresses[position], -1)) for position, places in bound.donated]
        places = tuple([place for place in offsets if place[1] >= 0])
        if not places:
            return bound
        known = self._elsewhere.get((number, places))
        if known is None:
            self._refuse_late(number, stream)
            with Relaxed():
                known = self._bind_elsewhere(number, places)
        return known

    def watch(self, profile: Profile | None) -> None:
        """Times the steps for a profile; None ends it, and adds missing times."""
        if self._clock is not None:
            self._clock.settle()
            self.ready.update(self._unwatched)
            self._unwatched, self._clock = {}, None
        self._elsewhere.clear()
        if profile is not None:
            from .step_times import StepClock  # few programs are profiled

            self._clock = StepClock(self._order.default, profile)
            for number, bound in list(self.ready.items()):
                self._unwatched[number], self.ready[number] = bound, self._timed(number, bound)

    def clear(self) -> None:
        self.watch(None)
        self.ready.clear()

    # --- inside -----------------------------------------------------------------------------------------------

    def _refuse_late(self, number: int, stream: Any) -> None:
        if self._late and self._order.capturing(stream):
            raise CallError(
                "capture-refused",
                f"int_key {self._shared.programs[number].key} is not built yet, and cannot be while a CUDA graph is captured",
                "call it once before the capture, or load the bundle with lazy=False",
            )

    def _donations(self) -> Iterator[tuple[int, Places]]:
        for number, inputs in self._shared.donated.items():
            for chosen in dict.fromkeys([source for places in inputs.values() for source in places.values()]):
                rows = [(at, offset, source) for at, places in inputs.items() for offset, source in places.items()]
                yield number, tuple([(at, offset) for at, offset, source in rows if source == chosen])

    def _bind_elsewhere(self, number: int, places: Places) -> BoundProgram:
        bound = self._bound(number, places)
        timed = self._elsewhere[number, places] = bound if self._clock is None else self._timed(number, bound)
        return timed

    def _timed(self, number: int, bound: BoundProgram) -> BoundProgram:
        assert self._clock is not None
        return bound._replace(
            steps=self._clock.steps(self._shared.manifest, self._shared.entries[number], self._shared.programs[number], bound.steps)
        )

    def _bound(self, number: int, places: Places = ()) -> BoundProgram:
        shared, memories = self._shared, self._memories
        program, entry, donated = shared.programs[number], shared.entries[number], shared.donated.get(number, {})
        moves: tuple[Move, ...] = ()
        if places:
            from .moves import with_inputs_at  # few bundles have donations

            program, moves = with_inputs_at(program, places)
        buffers = static_buffers(program, memories)
        rows = [program.values[index] for index in program.outputs]
        outputs = [(memories.address(row.memory, row.offset), span(row)) for row in rows]
        files = [step.file for step in program.steps if step.kind == "graph"]
        alone = not donated and not places and len(files) == 1 and files[0] not in shared.shared_files
        # calls of such a program take the fast path, and its outputs are copied by the launch
        one_step = alone and len(program.steps) == 1 and not (shared.manifest.world or entry.mutated_inputs or entry.aliases)
        copied = outputs if one_step and all(size for _, size in outputs) else []
        with shared.lock:
            steps, joins = [[self._step(program, step, moves, copied, join) for step in program.steps] for join in (False, True)]
            graph = self._executor(files[0], moves, copied) if alone else None
        readers = graph.readers if graph is not None and _inputs_are_read(program, entry) else ()
        return BoundProgram(
            inputs=_inputs(program, buffers, readers, memories),
            steps=steps,
            joins=joins,
            written=[(index, *buffers[index]) for index in entry.mutated_inputs],
            results=DeviceOutputs([address for address, _ in outputs], shared.context.index, self._copy_out),
            sizes=[size for _, size in outputs],
            donated=[(at, {memories.address("arena", offset): offset for offset in offsets}) for at, offsets in donated.items()],
            copying=graph.copying() if graph is not None and copied else None,
        )

    def _step(
        self, program: Program, step: Step, moves: tuple[Move, ...], copied: Sequence[tuple[int, int]], join: bool
    ) -> Callable[[Any], None]:
        if step.kind == "graph":
            executor = self._executor(step.file, moves, copied)
            return executor.join if join else executor.launch
        if step.kind == "copy":  # `check_steps` has checked that both have the same layout
            source, target = program.values[step.inputs[0]], program.values[step.outputs[0]]
            start, end = [self._memories.address(value.memory, value.offset) for value in (source, target)]
            size, out, into = span(source), source.memory != HOST, target.memory != HOST
            return lambda stream: memory.copy(end, start, size, stream, target_on_device=into, source_on_device=out)
        assert self._host is not None  # programs with host steps have host regions
        return self._host.step(program, step)

    def _executor(self, file: str, moves: tuple[Move, ...], copied: Sequence[tuple[int, int]]) -> GraphExecutor | StreamExecutor:
        """The executor of a file, created on first use; `moves`: addresses that differ. `copied`: outputs that a launch can copy,
        (address, bytes)."""
        executor = self._executors.get((file, moves))
        if executor is not None:
            return executor
        shared, bases = self._shared, self._memories.bases
        table: Table | None = Table(shared.bundle.data(file), file)
        if shared.relocation is not None and table is not None:
            table = shared.relocation.moved(table)
        if moves and table is not None:
            from .moves import moved

            table = moved(table, moves)
        if table is None:
            executor = self._executor(file, (), ())
        elif shared.mode == "graph":
            executor = GraphExecutor(shared.context, table, self._modules, bases, self._order.default, shared.poison, copied)
        else:
            from ..cuda.stream_executor import StreamExecutor  # servers launch graphs

            executor = StreamExecutor(table, self._modules, bases, shared.poison)
        self._executors[file, moves] = executor
        return executor


def static_buffers(program: Program, memories: Memories) -> list[tuple[int, int]]:
    """(address, bytes) of each input's static buffer."""
    rows = [program.values[index] for index in program.inputs]
    return [(memories.address(row.memory, row.offset), span(row)) for row in rows]


def _inputs_are_read(program: Program, entry: EntrySpec) -> bool:
    """Whether only recordings use the inputs, only read them, and no output overlaps them."""
    others = [step for step in program.steps if step.kind != "graph"]
    named = [*program.outputs, *[index for step in others for index in (*step.inputs, *step.outputs)]]
    return not entry.mutated_inputs and not entry.aliases and all(program.values[index].memory != INPUTS for index in named)


def _inputs(program: Program, buffers: Sequence[tuple[int, int]], readers: Sequence[Reader], memories: Memories) -> list[Input]:
    """The inputs with the kernels that have their addresses, or the address after the last byte unless another input starts
    there."""
    rows = [program.values[index] for index in program.inputs]
    begins = {row.offset for row in rows}
    written = [memories.range(name) for name in (INPUTS, "arena", STATE)] if readers else []
    inputs = []
    for row, (target, size) in zip(rows, buffers, strict=True):
        begin, end = extent(row)
        end += end not in begins
        reading = [reader for reader in readers if any([begin <= offset < end for offset, _ in reader.words])] if size else []
        words = [(offset - row.offset, word) for reader in reading for offset, word in reader.words if begin <= offset < end]
        inputs.append(Input(target, size, reading, words, written))
    return inputs
