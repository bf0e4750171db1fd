"""The CUDA backend: a bundle's memories, modules and executors on one GPU.

What the loader does with it (guards, dispatch, padding and the kinds of tensors are the loader's):

    backend = CudaBackend(folder, manifest, device=0, mode="graph")     # manifest, lengths and hashes checked before
    backend.prepare()                                # optional: builds every recording now instead of at its first run
    with backend.lock:                               # one call at a time: inputs, arena and outputs belong to all of them
        outputs = backend.run(program, [(pointer, on_device, nbytes), ...], stream)
        kept = backend.copy_out(outputs[0], backend.sizes(program)[1][0], stream)     # an Output: .address, .bytes, .free()
    backend.close()

`stream` is a driver or runtime stream handle (an int, 0 the legacy default stream), or None for the backend's own non-blocking
stream. Everything is enqueued in the order of that stream; nothing waits but `to_host`, `synchronize`, and copies from pageable
host memory. Calls on different streams are put in order by events.  Any thread may call: the context is made current for the
call and taken away again.  A device pointer must be readable by this GPU, and ready in the order of the stream.

An input is contiguous in the order of its spec and goes to its static buffer.  When it is shorter than the buffer, the rest is
filled with zeros, so a call padded along its outermost axis needs no copy of the loader's.  None leaves the buffer as it is:
the caller has filled it through `copy` or `copy_rows` at `backend.input_addresses(program)`.

The addresses that `run` returns are those of the program's outputs, laid out as their values say, and the next run overwrites them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..archive import WEIGHTS
from ..errors import FormatUnsupported, ManifestInvalid, ProgramClosed
from ..safetensors import read_header
from ..schema import DTYPES, Manifest, Program, Step, Value
from ..tableview import Table
from . import driver, memory, weights
from .driver import Context, cu
from .executors import MODES, Executor, GraphExecutor, StreamExecutor
from .machine import check_device, check_driver
from .memory import Memories, Output
from .modules import Modules, read
from .order import StreamOrder

if TYPE_CHECKING:
    from ..recording import ModuleState

KERNELS = "kernels"

Input = tuple[int, bool, int]
"""Where an input lies: address, whether that is on the GPU, bytes."""

HostStep = Callable[[int, Step, Any], None]
"""Runs a host step: position of the program, the step, the stream (a CUstream), in whose order the outputs must then be ready."""


class Usage(NamedTuple):
    """Bytes on the GPU: of each memory, what all of them take, and by how much the GPU's free memory fell since the context was
    there (kernel images and graphs included, and whatever other processes did meanwhile)."""

    memories: dict[str, int]
    planned: int
    measured: int


class _Plan(NamedTuple):
    """A program with its addresses: (address, bytes) of each input's static buffer, the addresses of the outputs, and its steps."""

    inputs: list[tuple[int, int]]
    pointers: list[Any]  # of the inputs' static buffers, as the driver's own type
    addresses: list[int]
    steps: list[Callable[[Any], None]]


def open(
    manifest: Manifest, directory: str | os.PathLike[str], device: int = 0, mode: str = "graph", poison: int | None = None
) -> CudaBackend:
    """The bundle in `directory` on GPU number `device`: see `CudaBackend`."""
    return CudaBackend(os.fspath(directory), manifest, device, mode, poison=poison)


class CudaBackend:
    """Runs the programs of a cuda bundle: see the top of this file.

    `mode`: "graph" replays each recording as one CUDA graph, "stream" launches its rows one by one.  `poison`: a byte that
    fills the arena, and all bytes of parameters that the recordings call undefined; results must not depend on it.  `host` runs
    host steps. `context`: one that a thread of the caller has made while the manifest was checked; it belongs to the backend
    from then on.

    Raises LibraryMissing, WrongMachine, OutOfMemory, DriverFailed, WeightsInvalid, TableInvalid, FileDamaged; nothing is left
    on the GPU then.
    """

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        device: int = 0,
        mode: str = "graph",
        *,
        poison: int | None = None,
        host: HostStep | None = None,
        context: Context | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        self.lock = RLock()
        self._folder, self._manifest, self._mode, self._poison, self._host = folder, manifest, mode, poison, host
        self._images = {file.path.rpartition("/")[2] for file in manifest.files if file.path.startswith(f"{KERNELS}/")}
        self._executors: dict[str, Executor] = {}
        self._plans: dict[int, _Plan] = {}
        with ExitStack() as undo:
            if context is not None:
                undo.callback(context.release)
            self._check_steps()
            pieces = self._weight_pieces()
            check_driver(manifest.target)
            if context is None:
                context = Context(device)
                undo.callback(context.release)
            check_device(manifest.target, context)
            self._context = context
            self._cleanup = ExitStack()
            undo.callback(self._give_back)
            with context:
                self._open(self._cleanup, pieces)
            undo.pop_all()
        self._closed = False

    def _open(self, cleanup: ExitStack, pieces: list[weights.Piece]) -> None:
        self._free_before = driver.free_bytes()
        self._order = StreamOrder(self._context, cleanup)
        self._memories = Memories(dict(self._manifest.memories), cleanup, self._order.default)
        base = self._memories.address("weights", 0)
        # From here on the weights travel in other threads while this one loads modules and builds graphs.
        self._upload: weights.Upload | None = weights.Upload(self._context, f"{self._folder}/{WEIGHTS}", pieces, base)
        cleanup.callback(self._upload.stop)
        self._modules = Modules(f"{self._folder}/{KERNELS}", self._states(), self._memories)
        cleanup.callback(self._modules.close)
        cleanup.callback(self._close_executors)
        if self._poison is not None:
            self._memories.poison("arena", self._poison, self._order.default)

    def _states(self) -> tuple[ModuleState, ...]:
        name = self._manifest.module_state
        if not name:
            return ()
        from ..modulestates import check_states, decode_states  # few bundles have any

        states = decode_states(read(f"{self._folder}/{name}"), name)
        check_states(states, name, dict(self._manifest.memories), self._images)
        return states

    def _weight_pieces(self) -> list[weights.Piece]:
        if not self._manifest.weights:
            return []
        with os.fdopen(os.open(f"{self._folder}/{WEIGHTS}", os.O_RDONLY), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # the disk reads while the driver starts
            entries = read_header(file, WEIGHTS)
        return weights.pieces(self._manifest.weights, entries, dict(self._manifest.memories).get("weights", 0))

    def _check_steps(self) -> None:
        for number, program in enumerate(self._manifest.programs):
            for index, step in enumerate(program.steps):
                if step.kind == "host" and self._host is None:
                    name = self._manifest.regions[step.region].name
                    where = f"programs[{number}].steps[{index}]"
                    raise FormatUnsupported(
                        f"{where}: region {name!r} runs on the host, which this cgbundle does not do beside a GPU"
                    )

    # --- running ----------------------------------------------------------------------------------------------

    def prepare(self, programs: Iterable[int] | None = None) -> None:
        """Builds the recordings of these programs (all when None) and waits for the weights: later runs only launch."""
        with self.lock, self._current():
            for number in range(len(self._manifest.programs)) if programs is None else programs:
                self._plan(number)
            self._settle()

    def turn(self, stream: int | None = None) -> Turn:
        """`with backend.turn(stream) as handle:` holds the memories for one call, and the context: what is enqueued on the stream
        inside, by whomever, comes after the turn before and before the next one."""
        return Turn(self, stream)

    def run(self, program: int, inputs: Sequence[Input | None], stream: int | None = None) -> list[int]:
        """Replays program number `program` in the order of the stream; returns the addresses of its outputs on the GPU."""
        with self.turn(stream) as handle:
            return self.replay(program, inputs, handle)

    def replay(self, program: int, inputs: Sequence[Input | None], handle: Any) -> list[int]:
        """`run`, inside a turn whose handle is `handle`."""
        plan = self._plans.get(program) or self._plan(program)
        if self._upload is not None:
            self._settle()
        for (target, size), item in zip(plan.inputs, inputs, strict=True):
            if item is not None:
                _fill_input(target, size, item, handle)
        for step in plan.steps:
            step(handle)
        return plan.addresses

    def replay_on_device(self, program: int, addresses: Sequence[int], handle: Any) -> None:
        """`replay` of whole inputs that lie on the GPU: the path that every microsecond of is measured."""
        plan = self._plans.get(program)
        if plan is None:
            self.prepare((program,))
            plan = self._plans[program]
        for address, (target, size), pointer in zip(addresses, plan.inputs, plan.pointers, strict=True):
            if address != target and size:
                error = cu.cuMemcpyDtoDAsync(pointer, address, size, handle)[0]
                if error:
                    driver.check("cuMemcpyDtoDAsync", (error,))
        for step in plan.steps:
            step(handle)

    def sizes(self, program: int) -> tuple[list[int], list[int]]:
        """Bytes of each input's static buffer and of each output (from its first byte to its last)."""
        values = self._manifest.programs[program]
        return [span(values.values[i]) for i in values.inputs], [span(values.values[i]) for i in values.outputs]

    def input_addresses(self, program: int) -> list[int]:
        """Where the inputs' static buffers lie on the GPU."""
        values = self._manifest.programs[program]
        return [self._address(values.values[index]) for index in values.inputs]

    def output_addresses(self, program: int) -> list[int]:
        """Where the outputs lie on the GPU, after every replay."""
        values = self._manifest.programs[program]
        return [self._address(values.values[index]) for index in values.outputs]

    def poison(self, byte: int, stream: int | None = None) -> None:
        """Overwrites the arena, and with it outputs of earlier calls, with `byte`: a sound recording's results do not change."""
        with self.lock, self._current():
            handle = self._order.begin(stream)
            self._memories.poison("arena", byte, handle)
            self._order.end(handle)

    # --- outputs ----------------------------------------------------------------------------------------------

    def allocate(self, size: int, stream: int | None = None) -> Output:
        """Fresh GPU memory that outlives the backend, ready in the order of the stream."""
        with self.lock, self._current():
            return Output(self._context, size, self._order.handle(stream))

    def copy_out(self, address: int, size: int, stream: int | None = None) -> Output:
        """A copy of GPU memory that the next run leaves alone."""
        with self.lock, self._current():
            handle = self._order.begin(stream)
            output = Output(self._context, size, handle)
            memory.copy(output.address, address, size, handle)
            self._order.end(handle)
            return output

    def copy(
        self,
        target: int,
        source: int,
        size: int,
        stream: int | None = None,
        *,
        target_on_device: bool = True,
        source_on_device: bool = True,
    ) -> None:
        """Copies bytes in the order of the stream: see `memory.copy`."""
        with self.lock, self._current():
            handle = self._order.begin(stream)
            memory.copy(target, source, size, handle, target_on_device=target_on_device, source_on_device=source_on_device)
            self._order.end(handle)

    def copy_rows(self, target: int, source: int, width: int, rows: int, stream: int | None = None, **places: Any) -> None:
        """Copies rows in the order of the stream: see `memory.copy_rows`."""
        with self.lock, self._current():
            handle = self._order.begin(stream)
            memory.copy_rows(target, source, width, rows, handle, **places)
            self._order.end(handle)

    def to_host(self, target: int, source: int, size: int, stream: int | None = None) -> None:
        """Copies GPU memory to the host address `target` and waits for it."""
        with self.lock:
            self.copy(target, source, size, stream, target_on_device=False)
            self.synchronize(stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Waits for all work on the stream; a fault of a kernel shows here as DriverFailed."""
        with self.lock, self._current():
            handle = self._order.handle(stream)
            driver.check("cuStreamSynchronize", cu.cuStreamSynchronize(handle))

    # --- memory -----------------------------------------------------------------------------------------------

    def used_bytes(self) -> Usage:
        """What the bundle takes of the GPU, as planned and as the driver sees it."""
        with self.lock, self._current():
            return Usage(dict(self._memories.sizes), self._memories.planned(), self._free_before - driver.free_bytes())

    def close(self) -> None:
        """Waits for what runs and gives everything back but Outputs not freed yet; they keep the context.  Closing twice does
        nothing."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._give_back()
            finally:
                self._context.release()

    # --- inside -----------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        with self._context, self._cleanup:
            cu.cuCtxSynchronize()  # unchecked: a fault of a kernel was reported, or shows in the frees, which are all tried
        self._plans.clear()

    def _current(self) -> Context:
        if self._closed:
            raise ProgramClosed(f"program {self._manifest.name!r} was closed")
        return self._context

    def _settle(self) -> None:
        """Waits until weights and zeroed memories are in place."""
        if self._upload is not None:
            self._upload.wait()
            driver.check("cuStreamSynchronize", cu.cuStreamSynchronize(self._order.default))
            self._upload = None

    def _address(self, value: Value) -> int:
        return self._memories.address(value.memory, value.offset)

    def _plan(self, number: int) -> _Plan:
        plan = self._plans.get(number)
        if plan is None:
            program = self._manifest.programs[number]
            inputs = [(self._address(program.values[i]), span(program.values[i])) for i in program.inputs]
            outputs = [(self._address(program.values[i]), span(program.values[i])) for i in program.outputs]
            steps = [self._step(number, program, step) for step in program.steps]
            pointers = [cu.CUdeviceptr(address) for address, _ in inputs]
            plan = self._plans[number] = _Plan(inputs, pointers, [address for address, _ in outputs], steps)
        return plan

    def _step(self, number: int, program: Program, step: Step) -> Callable[[Any], None]:
        if step.kind == "graph":
            return self._executor(step.file).launch
        if step.kind == "copy":
            return self._copy_step(program, step)
        return self._host_step(number, step)

    def _copy_step(self, program: Program, step: Step) -> Callable[[Any], None]:
        source, target = program.values[step.inputs[0]], program.values[step.outputs[0]]
        if (source.dtype, source.shape, source.strides) != (target.dtype, target.shape, target.strides):
            raise ManifestInvalid(f"a copy step between {source} and {target}: expected the same layout")
        start, end, size = self._address(source), self._address(target), span(source)
        return lambda stream: memory.copy(end, start, size, stream)

    def _host_step(self, number: int, step: Step) -> Callable[[Any], None]:
        host = self._host
        assert host is not None  # `_check_steps` refused otherwise
        return lambda stream: host(number, step, stream)

    def _executor(self, file: str) -> Executor:
        executor = self._executors.get(file)
        if executor is None:
            table = Table(read(f"{self._folder}/{file}"), file)
            bases = self._memories.bases
            if self._mode == "graph":
                executor = GraphExecutor(self._context, table, self._modules, bases, self._order.default, self._poison)
            else:
                executor = StreamExecutor(table, self._modules, bases, self._poison)
            self._executors[file] = executor
        return executor

    def _close_executors(self) -> None:
        with ExitStack() as each:
            for executor in self._executors.values():
                each.callback(executor.close)
            self._executors = {}


class Turn:
    """See `CudaBackend.turn`."""

    __slots__ = ("_backend", "_handle", "_stream")

    def __init__(self, backend: CudaBackend, stream: int | None) -> None:
        self._backend, self._stream = backend, stream

    def __enter__(self) -> Any:
        backend = self._backend
        backend.lock.acquire()
        try:
            error = cu.cuCtxPushCurrent(backend._current().handle)[0]
            if error:
                driver.check("cuCtxPushCurrent", (error,))
        except BaseException:
            backend.lock.release()
            raise
        try:
            self._handle = backend._order.begin(self._stream)
        except BaseException:
            self._leave()
            raise
        return self._handle

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._backend._order.end(self._handle)
        finally:
            self._leave()

    def _leave(self) -> None:
        error = cu.cuCtxPopCurrent()[0]
        self._backend.lock.release()
        if error:
            driver.check("cuCtxPopCurrent", (error,))


def span(value: Value) -> int:
    """Bytes from a value's first element to the end of its last."""
    if 0 in value.shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)) + 1) * DTYPES[value.dtype]


def _fill_input(target: int, size: int, item: Input, stream: Any) -> None:
    pointer, on_device, given = item
    if given > size:
        raise ValueError(f"an input of {given} bytes for a buffer of {size}")
    if pointer != target:  # the caller may have written into the static buffer itself
        memory.copy(target, pointer, given, stream, source_on_device=on_device)
    memory.fill(target + given, size - given, 0, stream)
