"""The CUDA backend: a bundle's memories, modules and executors on one GPU.

What the loader does with it (guards, dispatch, padding and the kinds of tensors are the loader's):

    backend = CudaBackend(folder, manifest, device=0, mode="graph")     # manifest, lengths and hashes checked before
    backend.prepare()                                # optional: builds every recording now instead of at its first run
    with backend.lock:                               # one call at a time: inputs, arena and outputs belong to all of them
        outputs = backend.run(program, [(pointer, on_device, nbytes), ...], stream)
        kept = backend.copy_out(outputs[0], backend.sizes(program)[1][0], stream)     # an Output: .address, .bytes, .free()
    backend.close()

`stream` is a driver or runtime stream handle (an int, 0 the legacy default stream), or None for the backend's own non-blocking
stream. Everything is enqueued in the order of that stream; nothing waits but `to_host`, `synchronize`, host steps, and copies from
pageable host memory. Calls on different streams are put in order by events.  Any thread may call: the context is made current for
the call and taken away again.  A device pointer must be readable by this GPU, and ready in the order of the stream.

An input is contiguous in the order of its spec and goes to its static buffer.  When it is shorter than the buffer, the rest is
filled with zeros, so a call padded along its outermost axis needs no copy of the loader's.  None leaves the buffer as it is:
the caller has filled it through `copy` or `copy_rows` at `backend.input_addresses(program)`.

The addresses that `run` returns are those of the program's outputs, laid out as their values say, and the next run overwrites them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from ..archive import WEIGHTS
from ..errors import ProgramClosed
from ..extents import span
from ..processor import check_features
from ..schema import Manifest, Value
from . import driver, memory, weights
from .driver import Context, cu
from .executors import MODES
from .machine import check_device, check_driver
from .memory import Input, Memories, Output
from .modules import Modules, states
from .order import StreamOrder
from .steps import Executors, Plan, make_plan
from .turn import Turn

if TYPE_CHECKING:
    from .hoststeps import HostSteps


class Usage(NamedTuple):
    """Bytes on the GPU: of each memory, what all of them take, and by how much the GPU's free memory fell since the context was
    there (kernel images and graphs included, and whatever other processes did meanwhile)."""

    memories: dict[str, int]
    planned: int
    measured: int


def open(
    manifest: Manifest, directory: str | os.PathLike[str], device: int = 0, mode: str = "graph", poison: int | None = None
) -> CudaBackend:
    """The bundle in `directory` on GPU number `device`: see `CudaBackend`."""
    return CudaBackend(os.fspath(directory), manifest, device, mode, poison=poison)


class CudaBackend:
    """Runs the programs of a cuda bundle: see the top of this file.

    `mode`: "graph" replays each recording as one CUDA graph, "stream" launches its rows one by one.  `poison`: a byte that
    fills the arena, memory `host`, and all bytes of parameters that the recordings call undefined; results must not depend on it.
    `context`: one that a thread of the caller has made while the manifest was checked; it belongs to the backend from then on.

    Raises LibraryMissing, LibraryRefused, WrongMachine, OutOfMemory, DriverFailed, WeightsInvalid, TableInvalid, FileDamaged;
    nothing is left on the GPU then.
    """

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        device: int = 0,
        mode: str = "graph",
        *,
        poison: int | None = None,
        context: Context | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        self.lock = RLock()
        self._folder, self._manifest, self._mode, self._poison = folder, manifest, mode, poison
        self._plans: dict[int, Plan] = {}
        with ExitStack() as undo:
            if context is not None:
                undo.callback(context.release)
            check_features(manifest.target.features)
            pieces = weights.listed(folder, manifest)
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
        self._modules = Modules(f"{self._folder}/kernels", states(self._folder, self._manifest), self._memories)
        cleanup.callback(self._modules.close)
        stream, bases = self._order.default, self._memories.bases
        self._executors = Executors(self._folder, self._mode, self._context, self._modules, bases, stream, self._poison)
        cleanup.callback(self._executors.close)
        self._host: HostSteps | None = None
        if any(region.kind == "host" for region in self._manifest.regions):
            from .hoststeps import HostSteps  # few bundles have any, and torch's libraries with them

            self._host = HostSteps(self._folder, self._manifest, self._memories)
            cleanup.callback(self._host.close)
        if self._poison is not None:
            self._memories.poison(self._poison, stream)

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
                memory.fill_input(target, size, item, handle)
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
        """Overwrites the arena, and with it outputs of earlier calls, and memory `host` with `byte`: the results of sound
        recordings and steps do not change."""
        with self.lock, self._current():
            handle = self._order.begin(stream)
            self._memories.poison(byte, handle)
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

    def _plan(self, number: int) -> Plan:
        plan = self._plans.get(number)
        if plan is None:
            program = self._manifest.programs[number]
            plan = self._plans[number] = make_plan(program, self._memories, self._executors, self._host)
        return plan
