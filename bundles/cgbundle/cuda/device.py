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
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CallError, ProgramClosed
from ..format.schema import KERNEL_CODE, Manifest, Value, Weight
from ..format.spans import span
from ..session.locks import Exclusive
from . import driver, memory, state
from .copies import Copies
from .driver import Context, Relaxed, cu
from .executors import MODES
from .memory import WEIGHTS, Input, Memories
from .shared import Shared
from .steps import Executors, Plan, make_plan
from .stream_order import StreamOrder
from .turn import Turn

if TYPE_CHECKING:
    from .host_steps import HostSteps


SHARED = (WEIGHTS, KERNEL_CODE)
"""Memories that belong to no session alone."""

HOSTED = "operations on the host, which this bundle has, cannot become part of a CUDA graph"


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


class CudaBackend(Copies):
    """Runs the programs of a cuda bundle: see the top of this file.

    `mode`: "graph" replays each recording as one CUDA graph, "stream" launches its rows one by one.  `poison`: a byte that
    fills the arena, memory `host`, and all bytes of parameters that the recordings call undefined; results must not depend on it.
    `context`: one that a thread of the caller has made while the manifest was checked; it belongs to the backend from then on.

    Raises library-missing, library-refused, wrong-machine, OutOfMemory, driver-failed, weights-invalid, table-invalid, file-damaged;
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
        self._attach(Shared(folder, manifest, device, mode, poison, context), alone=False)

    def session(self) -> CudaBackend:
        """A further session: memories, stream and graphs of its own, the same weights and kernels.  One thread at a time may use
        it, another one raises SessionBusy.  Whichever is closed last gives back what they share."""
        with self._gate:
            self._current()
            self._shared.retain()
        made = object.__new__(CudaBackend)
        made._attach(self._shared, alone=True)
        return made

    def _attach(self, shared: Shared, *, alone: bool) -> None:
        """Begins with one share of what sessions share, which is given back where this fails."""
        exclusive = Exclusive(shared.manifest.name)
        self._gate = exclusive.inner
        self.lock = exclusive if alone else exclusive.inner
        self._shared, self._context, self._manifest = shared, shared.context, shared.manifest
        self._plans: dict[int, Plan] = {}
        self._cleanup = ExitStack()
        with ExitStack() as undo:
            undo.callback(shared.release)
            undo.callback(self._give_back)
            with self._context, Relaxed():
                self._open(self._cleanup, alone=alone)
            undo.pop_all()
        self._closed = False

    def _open(self, cleanup: ExitStack, *, alone: bool) -> None:
        shared, context = self._shared, self._context
        self._free_before = driver.free_bytes() if alone else shared.free_before
        own = {name: size for name, size in shared.sizes.items() if name not in SHARED}
        self._sizes = own if alone else shared.sizes
        stream = context.lend() if alone else context.stream
        if alone:
            cleanup.callback(context.back, stream)
        hosted = any(region.kind == "host" for region in self._manifest.regions)
        self._order = StreamOrder(stream, cleanup, HOSTED if hosted else "")
        self._memories = Memories(own, shared.base, cleanup, stream)
        state.fill(self._memories, shared.initial, stream)
        with shared.lock:
            modules = shared.modules(self._memories, cleanup)
        self._executors = Executors(shared, modules, self._memories.bases, stream)
        cleanup.callback(self._executors.close)
        self._host: HostSteps | None = None
        if hosted:
            from .host_steps import HostSteps  # few bundles have any, and torch's libraries with them

            self._host = HostSteps(shared.folder, self._manifest, self._memories)
            cleanup.callback(self._host.close)
        if shared.poison is not None:
            self._memories.poison(shared.poison, stream)
        self._unsettled = True
        cleanup.callback(self._order.wait)

    # --- running ----------------------------------------------------------------------------------------------

    def prepare(self, programs: Iterable[int] | None = None) -> None:
        """Builds the recordings of these programs (all when None) and waits for the weights: later runs only launch."""
        with self.lock, self._current(), Relaxed():
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
        plan = self._plans.get(program) or self._built(program, handle)
        if self._unsettled:
            self._settle()
        for (target, size), item in zip(plan.inputs, inputs, strict=True):
            if item is not None:
                memory.fill_input(target, size, item, handle)
        for step in plan.joins if self._order.captured else plan.steps:
            step(handle)
        return plan.addresses

    def replay_on_device(self, program: int, addresses: Sequence[int], handle: Any) -> None:
        """`replay` of whole inputs that lie on the GPU: the path that every microsecond of is measured."""
        plan = self._plans.get(program) or self._built(program, handle)
        for address, (target, size), pointer in zip(addresses, plan.inputs, plan.pointers, strict=True):
            if address != target and size:
                error = cu.cuMemcpyDtoDAsync(pointer, address, size, handle)[0]
                if error:
                    driver.check("cuMemcpyDtoDAsync", (error,))
        for step in plan.joins if self._order.captured else plan.steps:
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

    # --- what lasts from call to call -------------------------------------------------------------------------

    def place(self, weight: int) -> int:
        """Where a weight lies on the GPU, of memory weights or state."""
        row = self._manifest.weights[weight]
        return self._memories.address(row.memory, row.offset)

    def fetch(self, weight: int, handle: Any) -> bytes:
        """A weight's bytes, in the order of memory, inside a turn; waits for them."""
        return state.fetch(self.place(weight), _size(self._manifest.weights[weight]), handle)

    def store(self, weight: int, address: int, device: int | None, handle: Any) -> None:
        """Copies to a weight as many bytes as it has, inside a turn; from the CPU (None) it is done when this returns."""
        state.store(self.place(weight), address, _size(self._manifest.weights[weight]), device, handle)

    def reset(self, handle: Any) -> None:
        """Brings back what state held at first, inside a turn."""
        state.reset(self._memories, self._shared.initial, handle)

    # --- memory -----------------------------------------------------------------------------------------------

    def used_bytes(self) -> Usage:
        """What the bundle takes of the GPU, as planned and as the driver sees it."""
        with self.lock, self._current():
            return Usage(dict(self._sizes), memory.planned(self._sizes), self._free_before - driver.free_bytes())

    def close(self) -> None:
        """Waits for what runs and gives back what is the session's own, and with the last session the rest, but Outputs not freed
        yet; they keep the context.  Closing twice does nothing."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            try:
                self._give_back()
            finally:
                self._shared.release()

    # --- inside -----------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        with self._context, Relaxed(), self._cleanup:
            self._plans.clear()

    def _current(self) -> Context:
        if self._closed:
            raise ProgramClosed("program-closed", f"program {self._manifest.name!r} was closed")
        return self._context

    def _settle(self) -> None:
        """Waits until weights, zeroed memories and state are in place."""
        if self._unsettled:
            self._shared.settle()
            driver.check("cuStreamSynchronize", cu.cuStreamSynchronize(self._order.default))
            self._unsettled = False

    def _address(self, value: Value) -> int:
        return self._memories.address(value.memory, value.offset)

    def _built(self, number: int, handle: Any) -> Plan:
        """The plan of a program that no call has used yet.  Raises capture-refused inside a capture."""
        if self._order.capturing(handle):
            raise CallError(
                "capture-refused",
                f"int_key {self._manifest.programs[number].key} is not built yet, and cannot be while a CUDA graph is captured",
                "call it once before the capture, or load the bundle with lazy=False",
            )
        self.prepare((number,))
        return self._plans[number]

    def _plan(self, number: int) -> None:
        if number not in self._plans:
            with self._shared.lock:
                program = self._manifest.programs[number]
                self._plans[number] = make_plan(program, self._memories, self._executors, self._host)


def _size(row: Weight) -> int:
    return span(row)
