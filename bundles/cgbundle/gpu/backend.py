"""A session of a cuda bundle on one GPU: its memories and stream, its programs bound to them, and the order of its calls.

Everything is enqueued in the order of the caller's stream, or of the backend's own.  Nothing waits but host steps, copies to memory
of the CPU, and copies from its pageable memory.  Calls on different streams are put in order by events.  Any thread may call: the
context is made current for the call and taken away again.  A device pointer must be readable by this GPU, and ready in the order of
the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..call.forks import FORKS, forked
from ..call.locks import ExclusiveLock, closed, during, locked
from ..cuda import driver, memory
from ..cuda.background import Background, ContextFuture
from ..cuda.driver import Context, Relaxed, cu
from ..cuda.memory import PEER, WEIGHTS, Memories, Output
from ..cuda.stream_order import StreamOrder
from ..errors import CallError
from ..format.archive import Archive
from ..format.schema import KERNEL_CODE, STATE
from ..format.spans import span
from ..tensors.library import caller_captures
from .device_bundle import DeviceBundle
from .outputs import DeviceOutputs, HostCopies, HostOutputs
from .programs import Executors, Programs, static_buffers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..call.fast_path import Caller
    from ..call.profile import Profile
    from ..format.schema import Manifest
    from ..weights.update import Contents, OpenFile
    from .host_steps import HostSteps

SHARED = (WEIGHTS, KERNEL_CODE, PEER)
"""Memories that belong to no session alone."""

EAGER = 1
"""Programs whose graphs are built before a load returns, where nothing else is asked for: the first answer needs one.  Of a GPT of
three keys, one instead of all takes 11 to 18 ms off 340 to 400 (tests/gpu/REPORT.md); all of 64 would take as long as all the
rest."""

HOSTED = "operations on the host, which this bundle has, cannot become part of a CUDA graph"
SIZED = "outputs whose sizes depend on data, which this bundle has, are waited for: a CUDA graph cannot"


class CudaBackend:
    """Runs the programs of a cuda bundle on GPU number `device`.

    `mode`: "graph" replays each recording as one CUDA graph, "stream" launches its rows one by one.  `context`: one that the caller
    has made, or that is being made; it belongs to the backend from then on.  `poison`: a byte that fills the arena, memory `host`,
    and all bytes of parameters that the recordings call undefined; results must not depend on it.  `lazy`: bind a program at its
    first call; None: the first EAGER programs now, the others in the background, or at a call that comes before.  `threads`: how
    many the operations on the host use, None for OpenMP's own number.  `peer`: where memory peer lies, for a bundle that has one;
    the caller's to free.  `rows`: of state, by its dimensions.

    Raises library-missing, library-refused, wrong-machine, OutOfMemory, driver-failed, weights-invalid, table-invalid and
    file-damaged; nothing is left on the GPU then.
    """

    def __init__(
        self,
        bundle: Archive,
        device: int = 0,
        mode: str = "graph",
        *,
        context: Context | ContextFuture | None = None,
        poison: int | None = None,
        lazy: bool | None = None,
        threads: int | None = None,
        peer: int = 0,
        rows: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._start(DeviceBundle(bundle, device, mode, poison, context, threads, peer, rows), alone=False, lazy=lazy)

    @property
    def manifest(self) -> Manifest:
        """The bundle's, with as many rows of state as there are."""
        return self._manifest

    @property
    def code_bytes(self) -> int:
        """Bytes of the kernel images that every session loads for itself."""
        return self._shared.code_bytes

    def session(self) -> CudaBackend:
        """A further session: memories, stream and graphs of its own, the same weights and kernels.  One thread at a time may use
        it, another one raises SessionBusy.  Whichever is closed last gives back what they share."""
        self._check_fork()
        with self._shared.updating:
            with self.gate:
                self._current()
                self._shared.retain()
            session = object.__new__(CudaBackend)
            session._start(self._shared, alone=True, lazy=self._lazy or False)
        return session

    def _start(self, shared: DeviceBundle, *, alone: bool, lazy: bool | None) -> None:
        """Begins with one share of what sessions share, which is given back where this fails."""
        self._lock = ExclusiveLock(shared.manifest.name, alone=alone, updates=shared.updating)
        self.gate, self._forks, self._left = self._lock.inner, FORKS.number, False
        self._shared, self._context, self._manifest, self._lazy = shared, shared.context, shared.manifest, lazy
        self.device: int | None = shared.context.index
        self._context_handle = shared.context.handle
        self._cleanup = ExitStack()
        self._background: Background | None = None
        count = len(shared.programs)
        now = 0 if lazy else count if lazy is False else min(count, EAGER)
        with ExitStack() as undo:
            undo.callback(shared.release)
            undo.callback(self._give_back)
            with self._context, Relaxed():
                self._open(self._cleanup, alone=alone)
                self._programs.bind(range(now))
                if now == count:
                    self._programs.bind_donated()
                shared.settle()  # and zeroed memories and state
                driver.call("cuStreamSynchronize", self.order.default)
            undo.pop_all()
        if lazy is None and now < count:
            self._background = Background(self._rest())

    def _open(self, cleanup: ExitStack, *, alone: bool) -> None:
        shared, context = self._shared, self._context
        stream = context.lend() if alone else context.stream
        if alone:
            cleanup.callback(context.back, stream)
        hosted = any(region.kind == "host" for region in self._manifest.regions)
        sized = any(entry.data_sizes for entry in self._manifest.entries)
        self.order = StreamOrder(stream, cleanup, HOSTED if hosted else SIZED if sized else "")
        sizes = {name: size for name, size in shared.sizes.items() if name not in SHARED}
        self._memories = Memories(sizes, {WEIGHTS: shared.base, PEER: shared.peer}, cleanup, stream)
        self._fill_state(stream)
        self._copies = HostCopies(context, cleanup)
        with shared.lock:
            modules = shared.modules(self._memories, cleanup)
        self._executors = Executors()
        cleanup.callback(self._executors.close)
        self.host: HostSteps | None = None
        if hosted:
            from .host_steps import HostSteps  # few bundles have any, and torch's libraries with them

            self.host = HostSteps(shared.bundle, shared.hosted, self._memories, shared.threads)
            cleanup.callback(self.host.close)
        if shared.poison is not None:
            self._memories.poison(shared.poison, stream)
        cleanup.callback(self.order.wait)
        late = self._lazy is not None
        self._programs = Programs(shared, self._memories, modules, self._executors, self.host, self.order, self.copy_out, late=late)
        self._bound = self._programs.ready
        cleanup.callback(self._programs.clear)

    # --- running ----------------------------------------------------------------------------------------------

    @property
    def turn(self) -> AbstractContextManager[None]:
        """Holds the memories for one call."""
        return self._lock.turn

    @property
    def closed(self) -> bool:
        return self._lock.closed

    def begin(self, stream: int | None) -> Any:
        """Makes the context current.  What is enqueued on the stream until `end`, by whomever, comes after the call before and
        before the next one.  An interrupt right here may leave the context current, which is the one that other libraries use."""
        error = cu.cuCtxPushCurrent(self._context_handle)
        if error:
            driver.check("cuCtxPushCurrent", error)
        try:
            return self.order.begin(stream)
        except BaseException:
            cu.cuCtxPopCurrent(None)
            raise

    def end(self, stream: Any) -> None:
        """Gives the context back."""
        try:
            self.order.end(stream)
        finally:
            error = cu.cuCtxPopCurrent(None)
            if error:
                driver.check("cuCtxPopCurrent", error)

    def locked(self, stream: int | None) -> AbstractContextManager[Any]:
        return locked(self, stream)

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> DeviceOutputs | HostOutputs:
        """Replays, and copies back to the caller's memory the inputs that the model writes to, in the order of the stream.  Inputs
        of the CPU (device None) are copied to the GPU, the outputs back, and all copies waited for.  Those that are outputs of the
        entries that `Manifest.donations` name are read where they lie."""
        if device is None and caller_captures():
            text = "inputs on the CPU cannot become part of the CUDA graph that is being captured"
            raise CallError("capture-refused", text, "pass tensors of the GPU")
        bound = self._bound.get(program) or self._programs.first_used(program, stream)
        if device is None:
            return bound.replay_from_host(addresses, self._copies, stream, captured=self.order.captured)
        if bound.donated:
            bound = self._programs.over_donated(program, bound, addresses, stream)
        if self.order.captured:
            bound.join(addresses, stream)
        else:
            bound.replay(addresses, stream)
        for index, source, size in bound.written:
            if addresses[index] != source:
                memory.copy(addresses[index], source, size, stream)
        return bound.results

    def fast_path(self, program: int, caller: Caller) -> Callable[..., Any] | None:
        """`begin`, `run` and `end` in one piece.  None for a program that is not bound, writes to inputs, or is being profiled."""
        bound = self._bound.get(program)
        if bound is None or bound.written or not bound.steps or self._programs.watched:
            return None
        from .fast_path import fast_path  # calls from the CPU have none

        return fast_path(self._lock, self._forks, self._programs, program, self.order, self._context, caller)

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copies bytes of the GPU's, in the order of the stream."""
        error = cu.cuMemcpyDtoDAsync(target, source, size, stream)
        if error:
            driver.check("cuMemcpyDtoDAsync", error)

    def buffers(self, program: int) -> tuple[list[int], object]:
        """The addresses of the program's static input buffers, and what owns tensors over them."""
        with self.turn:  # which raises where this was closed
            return [address for address, _ in static_buffers(self._shared.programs[program], self._memories)], self

    def copy_out(self, address: int, size: int, stream: int | None) -> Output:
        """A copy of GPU memory that the next replay leaves alone, in the order of the stream."""

        def copied(handle: Any) -> Output:
            output = Output(self._context, size, handle)
            memory.copy(output.address, address, size, handle)
            return output

        return during(self, stream, copied)

    def populate(self) -> None:
        """Of weights on the GPU nothing is left to do; of those that the host's operations read.  Programs over inputs that lie
        where other calls leave them, which `lazy` put off, are built."""
        if self._shared.hosted is not None:
            self._shared.hosted.populate()
        if self._lazy and self._shared.donated:
            with self.turn, self._context, Relaxed():
                self._programs.bind_donated()
        if self._background is not None:
            self._background.stop()
            for _ in self._rest():
                pass

    def steps(self, program: int) -> Sequence[Callable[[Any], None]]:
        """What a replay of the program runs between its inputs and its outputs, functions of a stream: for measurements, inside of
        `locked`."""
        return (self._bound.get(program) or self._programs.first_used(program, self.order.default)).steps

    def watch(self, profile: Profile | None) -> None:
        self._check_fork()
        if profile is None and self.closed:
            return
        with self.turn, self._context:
            self._programs.watch(profile)

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        """Overwrites the arena, and with it outputs of earlier calls, and memory `host`: a sound replay reads nothing there that it
        has not written itself.  `reserved`: also what is reserved for outputs that a later call takes."""
        spared = [] if reserved else [(row.offset, row.offset + row.bytes) for row in self._manifest.donated]
        during(self, None, lambda handle: self._memories.poison(byte, handle, spared))

    # --- what lasts from call to call -------------------------------------------------------------------------

    @property
    def owner(self) -> object:
        """Keeps nothing: memory of the GPU is given back when the session is closed."""
        return self

    def address(self, weight: int, stream: Any = None) -> int:
        """Where a weight lies on the GPU, of memory weights or state."""
        row = self._manifest.weights[weight]
        return self._memories.address(row.memory, row.offset)

    def fetch(self, weight: int, stream: Any) -> bytes:
        """A weight's bytes, in the order of memory; waits for them."""
        return self.read(self.address(weight), self._size(weight), stream)

    def store(self, weight: int, address: int, device: int | None, stream: Any) -> None:
        """Copies to a weight as many bytes as it has; from memory of the CPU (None), which may be pinned and the caller's to change
        again, before this returns."""
        place, size = self.address(weight), self._size(weight)
        if device is not None:
            memory.copy(place, address, size, stream)
        else:
            self._copies.to_device(place, address, size, stream)
            driver.call("cuStreamSynchronize", stream)

    def update(
        self,
        contents: Mapping[int, Contents],
        sessions: Sequence[CudaBackend],
        files: Sequence[OpenFile],
        ready: Callable[[], None],
    ) -> None:
        """The new weights are brought to the GPU before any of them changes."""
        from .update import update  # few programs are updated

        self._check_fork()
        with ExitStack() as last:
            with self.gate:
                self._current()
                self._shared.retain()
            last.callback(self._shared.release)
            update(self._shared, contents, sessions, files, ready)

    @property
    def updated(self) -> bool:
        return self._shared.updated

    def write(self, address: int, data: bytes, stream: Any) -> None:
        """Copies bytes to the GPU."""
        buffer = ctypes.create_string_buffer(data, max(1, len(data)))
        memory.copy(address, ctypes.addressof(buffer), len(data), stream, source_on_device=False)
        driver.call("cuStreamSynchronize", stream)

    def read(self, address: int, size: int, stream: Any) -> bytes:
        """Bytes of the GPU; waits for them."""
        buffer = ctypes.create_string_buffer(max(1, size))
        memory.copy(ctypes.addressof(buffer), address, size, stream, target_on_device=False)
        driver.call("cuStreamSynchronize", stream)
        return buffer.raw[:size]

    def reset(self, stream: Any) -> None:
        for row in () if self._shared.initial is None else self._shared.initial.rows:
            if not row.source:
                memory.fill(self._memories.address(STATE, row.offset), row.size, 0, stream)
        self._fill_state(stream)

    def close(self) -> None:
        """Waits for what runs and gives back what is the session's own, and with the last session the rest, but Outputs not freed
        yet; they keep the context.  Closing twice does nothing, nor does closing in a forked process.  Behind a call of
        this very thread nothing is given back before it is closed once more, or forgotten."""
        if self._context.inherited:
            return
        self._lock.end()
        if self._background is not None:
            self._background.stop()
        if not self._lock.close():
            return
        with self.gate:
            if self._left:
                return
            self._left = True
            try:
                self._give_back()
            except BaseException:
                self._give_back()  # goes on where an interrupt ended it
                raise
            finally:
                self._shared.release()

    # --- inside -----------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        with self._context, Relaxed(), self._cleanup:
            pass

    def _fill_state(self, stream: Any) -> None:
        """Puts the initial contents that are no zeros into memory state, in the order of the stream."""
        for row in () if self._shared.initial is None else self._shared.initial.rows:
            if row.source:
                place = self._memories.address(STATE, row.offset)
                memory.copy(place, row.source, row.size, stream, source_on_device=False)

    def _check_fork(self) -> None:
        """Before any lock is waited for: who held it when the process was forked never lets it go."""
        if self._forks != FORKS.number:
            raise forked(self._manifest.name)

    def _current(self) -> Context:
        if self.closed:
            raise closed(self._manifest.name)
        return self._context

    def _size(self, weight: int) -> int:
        row = self._manifest.weights[weight]
        return span(row)

    def _rest(self) -> Iterator[None]:
        """Binds what is not bound yet, a program at a step; calls come between them.  Ends when this is closed."""
        for number, elsewhere in self._programs.unbound():
            with self.gate:
                if self.closed:
                    return
                with self._context, Relaxed():
                    self._programs.bind_one(number, elsewhere)
            yield
