"""A session of a cuda bundle on one GPU: memories, stream, bound programs, and the order of calls. Work is enqueued in the order of
the caller's stream, or the backend's own. Only host steps, copies to CPU memory, and copies from pageable memory wait. Events order
calls on different streams. Any thread may call: the context is current during the call. Device pointers must be readable by this
GPU, and ready in stream order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..call.locks import ExclusiveLock, closed, during, locked
from ..cuda import driver, memory
from ..cuda.driver import Context, Relaxed, cu
from ..cuda.memory import PEER, WEIGHTS, Memories, Output
from ..errors import CallError
from ..format.archive import Archive
from ..format.schema import KERNEL_CODE, STATE
from ..format.shapes import span
from ..process import FORKS, PAUSE, Background, ContextFuture, forked
from ..tensors.library import caller_captures
from .device_bundle import DeviceBundle
from .programs import Executors, Programs, static_buffers
from .streams import DeviceOutputs, HostCopies, HostOutputs, StreamOrder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..call.outputs import Caller
    from ..call.profile import Profile
    from ..call.update import Contents, OpenFile
    from ..format.schema import Manifest
    from .host_steps import HostSteps

SHARED = (WEIGHTS, KERNEL_CODE, PEER)  # memories that no session owns
EAGER = 1
"""Number of programs whose graphs are built before a load returns, by default. For a GPT of three keys, one instead of all saves 11
to 18 ms of 340 to 400 (tests/gpu/REPORT.md); all of 64 would take as long as the rest of the load."""

HOSTED = "operations on the host, which this bundle has, cannot become part of a CUDA graph"
SIZED = "this bundle has outputs whose sizes depend on data: a call waits for them, and a CUDA graph cannot wait"


class CudaBackend:
    """Runs the programs of a cuda bundle on GPU `device`. `mode`: "graph" or "stream" (launches a recording's nodes one by one).
    `context`: one that exists or is being created; the backend owns it. `poison` fills the arena, memory `host` and undefined
    parameter bytes, which results must not depend on. `lazy`: bind programs at their first call; None: the first EAGER ones now,
    others in the background or at a call. `threads` of host operations. `peer`: address of memory peer, which the caller frees.
    `rows` of state by dimension. Raises library-missing, library-refused, wrong-machine, OutOfMemory, driver-failed,
    weights-invalid, table-invalid, file-damaged, and then leaves nothing on the GPU."""

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
        """The bundle's, with the actual rows of state."""
        return self._manifest

    @property
    def code_bytes(self) -> int:
        return self._shared.code_bytes

    def session(self) -> CudaBackend:
        """Another session: own memories, stream and graphs, same weights and kernels. A call of it during a call of another thread
        raises SessionBusy. The last session to close frees what they share."""
        self._check_fork()
        with self._shared.updating:
            with self.gate:
                self._current()
                self._shared.retain()
            session = object.__new__(CudaBackend)
            session._start(self._shared, alone=True, lazy=self._lazy or False)
        return session

    def _start(self, shared: DeviceBundle, *, alone: bool, lazy: bool | None) -> None:
        """Takes over one reference to `shared` (`DeviceBundle.retain`), and releases it if this fails."""
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
                shared.settle()  # weights; the next line waits for zeroed memories and state
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
            from .host_steps import HostSteps  # few bundles have host steps, and their code loads torch's libraries

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
        return self._lock.turn

    @property
    def closed(self) -> bool:
        return self._lock.closed

    def begin(self, stream: int | None) -> Any:
        """Makes the context current. What is put on the stream before `end` is executed after the work of the previous call and
        before that of the next. An interrupt may leave the context current, which is harmless: other libraries use it too."""
        error = cu.cuCtxPushCurrent(self._context_handle)
        if error:
            driver.check("cuCtxPushCurrent", error)
        try:
            return self.order.begin(stream)
        except BaseException:
            cu.cuCtxPopCurrent(None)
            raise

    def end(self, stream: Any) -> None:
        try:
            self.order.end(stream)
        finally:
            error = cu.cuCtxPopCurrent(None)
            if error:
                driver.check("cuCtxPopCurrent", error)

    def locked(self, stream: int | None) -> AbstractContextManager[Any]:
        return locked(self, stream)

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> DeviceOutputs | HostOutputs:
        """Replays, and copies mutated inputs back, in stream order. Inputs on the CPU (device None) are copied to the GPU and
        outputs back; this waits for the copies. Donated outputs of other entries are read in place."""
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
        """None for a program that is not bound, writes to inputs, or is being profiled."""
        bound = self._bound.get(program)
        if bound is None or bound.written or not bound.steps or self._programs.watched:
            return None
        from .fast_path import fast_path  # calls with inputs on the CPU do not use it

        return fast_path(self._lock, self._forks, self._programs, program, self.order, self._context, caller)

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        error = cu.cuMemcpyDtoDAsync(target, source, size, stream)
        if error:
            driver.check("cuMemcpyDtoDAsync", error)

    def buffers(self, program: int) -> tuple[list[int], object]:
        with self.turn:  # raises if this was closed
            return [address for address, _ in static_buffers(self._shared.programs[program], self._memories)], self

    def copy_out(self, address: int, size: int, stream: int | None) -> Output:
        """Copies GPU memory, in stream order, to memory of its own, which replays do not change."""

        def copied(handle: Any) -> Output:
            output = Output(self._context, size, handle)
            memory.copy(output.address, address, size, handle)
            return output

        return during(self, stream, copied)

    def populate(self) -> None:
        """Loads weights of host operations, builds deferred programs that read donated outputs in place, finishes other builds."""
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
        """The steps of a replay without copies of inputs and outputs: functions of a stream, for measurements inside `locked`."""
        return (self._bound.get(program) or self._programs.first_used(program, self.order.default)).steps

    def watch(self, profile: Profile | None) -> None:
        self._check_fork()
        if profile is None and self.closed:
            return
        with self.turn, self._context:
            self._programs.watch(profile)

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        """Overwrites the arena (and outputs of earlier calls in it) and memory `host`; `reserved`: also donated outputs."""
        spared = [] if reserved else [(row.offset, row.offset + row.bytes) for row in self._manifest.donated]
        during(self, None, lambda handle: self._memories.poison(byte, handle, spared))

    # --- what lasts from call to call -------------------------------------------------------------------------

    @property
    def owner(self) -> object:
        """The owner of tensors over state or weights. It does not keep their memory (on a CPU it does): closing frees it."""
        return self

    def address(self, weight: int, stream: Any = None) -> int:
        row = self._manifest.weights[weight]
        return self._memories.address(row.memory, row.offset)

    def fetch(self, weight: int, stream: Any) -> bytes:
        return self.read(self.address(weight), self._size(weight), stream)

    def store(self, weight: int, address: int, device: int | None, stream: Any) -> None:
        """If `device` is None, `address` is in CPU memory, and the copy is complete on return: the memory may change afterwards."""
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
        """All new weights are copied to the GPU before any weight changes."""
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
        buffer = ctypes.create_string_buffer(data, max(1, len(data)))
        memory.copy(address, ctypes.addressof(buffer), len(data), stream, source_on_device=False)
        driver.call("cuStreamSynchronize", stream)

    def read(self, address: int, size: int, stream: Any) -> bytes:
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
        """Waits for running work and frees the session; the last one also frees what sessions share. Outputs keep the context. A
        second close, or one in a forked process, does nothing. If this thread is inside a call (as in a signal handler), it only
        refuses new calls, and the next close or garbage collection frees the session."""
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
                self._give_back()  # continues after an interrupt
                raise
            finally:
                self._shared.release()

    # --- inside -----------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        with self._context, Relaxed(), self._cleanup:
            pass

    def _fill_state(self, stream: Any) -> None:
        """Copies initial contents other than zeros into memory state, in stream order."""
        for row in () if self._shared.initial is None else self._shared.initial.rows:
            if row.source:
                place = self._memories.address(STATE, row.offset)
                memory.copy(place, row.source, row.size, stream, source_on_device=False)

    def _check_fork(self) -> None:
        """Checked before waiting for a lock, whose holder may be gone after a fork."""
        if self._forks != FORKS.number:
            raise forked(self._manifest.name)

    def _current(self) -> Context:
        if self.closed:
            raise closed(self._manifest.name)
        return self._context

    def _size(self, weight: int) -> int:
        row = self._manifest.weights[weight]
        return span(row)

    def _rest(self) -> Iterator[float]:
        """Binds the remaining programs between calls, at most one in each step, until this is closed."""
        for number, places in self._programs.unbound():
            with self.gate:
                if self.closed:
                    return
                with self._context, Relaxed():
                    self._programs.bind_one(number, places)
            yield PAUSE
