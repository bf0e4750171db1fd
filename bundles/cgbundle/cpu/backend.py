"""The cpu backend: every program is one host step over mapped weights; each session has its own state."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from threading import RLock, get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..call.locks import INSIDE, ExclusiveLock, Lock, Turn, closed, locked
from ..errors import MachineError
from ..format.archive import Archive
from ..format.file_names import WEIGHTS, all_programs
from ..format.schema import STATE, Target
from ..format.shapes import span
from ..process import forked
from ..validate.contents import SHARED_OBJECT, check_elf
from . import libtorch
from .host_region import INSTANCES, HostRegion, OutputLayouts, RegionOutputs, layout_of, open_region
from .host_weights import HostWeights, InitialState, anonymous, host_room, resized
from .machine import HINT, check_features, free_memory, memory_of_quota

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..call.profile import Profile
    from ..call.update import Contents, OpenFile


Run = tuple[Callable[..., None], int, OutputLayouts, deque[RegionOutputs]]
"""The run of a program's region, the number and layouts of its outputs, and released outputs for reuse."""


class BoundPrograms(NamedTuple):
    """A session's programs over one version of the weights; a call uses those that were current when it began. `runs`: one per
    program. Freed with the last call."""

    runs: list[Run]
    regions: list[HostRegion]
    weights: HostWeights


def check_machine(target: Target) -> None:
    machine = os.uname().machine
    if machine != target.arch:
        raise MachineError("wrong-machine", f"the bundle is for {target.arch} processors, this machine is {machine}")
    check_features(target.features, HINT)


KEPT = 0.25
"""Code with its own matrix products keeps a packed copy of weights up to this share of the process's memory. The system can evict
the mapped file."""


NOTHING: Mapping[str, int] = MappingProxyType({})


class HostBundle:
    """What all sessions share: torch's libraries, weights, initial state. As in eager PyTorch, callers may write to weights that
    the model returns: these pages become private to the process. Hold `updating` to change weights or to create a session."""

    def __init__(self, bundle: Archive, threads: int | None, rows: Mapping[str, int]) -> None:
        manifest, target = bundle.manifest, bundle.manifest.target
        check_machine(target)
        if manifest.state_dimensions:
            manifest = resized(manifest, rows, host_room(free_memory()))
        self.bundle, self.manifest = bundle, manifest
        self.torch = _interface(bundle, threads)
        self.programs = all_programs(manifest)
        returned = any(alias.memory == "weights" for entry in manifest.entries for alias in entry.aliases)
        self.weights = HostWeights(bundle.mapped(WEIGHTS, writable=returned))
        packs = not returned and not target.torch  # libtorch keeps no packed copy
        self.fixed = packs and dict(manifest.memories).get("weights", 0) <= KEPT * memory_of_quota()
        self.updating, self.updated = RLock(), False
        self.state = dict(manifest.memories).get(STATE, 0)
        self.initial = InitialState(bundle, manifest)


def _interface(bundle: Archive, threads: int | None) -> libtorch.LibTorch:
    """The C interface of torch's libraries, or of the bundle's own code. Raises library-refused."""
    target, regions = bundle.manifest.target, bundle.manifest.regions
    if target.torch or not regions:
        return libtorch.load(target.torch, threads)
    file = regions[0].file
    code = bundle.data(file)
    interface = libtorch.of_code(code, file, threads)
    if interface is None:
        check_elf(code, file, SHARED_OBJECT)  # raises the error of a damaged file
        text = f"{file}: lacks the runtime functions that the manifest promises"
        raise MachineError("library-refused", text, "build the bundle again")
    return interface


class SharedLock(Lock):
    """Concurrent turns of a program's replays. `close` waits until none runs; later turns raise ProgramClosed. Each thread has its
    own lock, for which only `close` waits: an interrupt could make a counter wrong."""

    __slots__ = ("_turns",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._turns: dict[int, Turn] = {}  # by thread identifier, which a later thread may have too

    @property
    def turn(self) -> AbstractContextManager[None]:
        self.check_fork()
        turn = self._turns.get(get_ident()) or self._turns.setdefault(get_ident(), Turn(self))
        return INSIDE if turn.owned() else turn

    def close(self) -> bool:
        self.closed = True
        return all([turn.wait() for turn in list(self._turns.values())])


class CpuBackend:
    """Runs the programs of a cpu bundle. Thread-safe: replays share only the weights; with state they run one at a time. `threads`
    per replay (None: OpenMP's default); `rows` of state by dimension. Raises library-missing, library-refused, wrong-machine,
    weights-invalid."""

    device: int | None = None
    code_bytes = 0

    def __init__(self, bundle: Archive, threads: int | None = None, rows: Mapping[str, int] = NOTHING) -> None:
        self._open(HostBundle(bundle, threads, rows), alone=False)

    def session(self) -> CpuBackend:
        """Another session, for one thread at a time, with its own state, static input buffers and host regions."""
        session = object.__new__(CpuBackend)
        session._open(self._use(), alone=True)
        return session

    def _open(self, shared: HostBundle, *, alone: bool) -> None:
        self.manifest = manifest = shared.manifest
        self._shared: HostBundle | None = shared  # None: closed
        self._name = manifest.name
        self._torch, self._weights, self._initial = shared.torch, manifest.weights, shared.initial
        one_by_one = alone or shared.state > 0
        self._lock = ExclusiveLock(manifest.name, alone=alone) if one_by_one else SharedLock(manifest.name)
        self._instances = 1 if one_by_one else INSTANCES
        self._state = anonymous(shared.state)
        self._buffers: dict[int, list[Any]] = {}
        self._profile: Profile | None = None
        self._bound: BoundPrograms | None = None
        self._restore()
        self._inputs = [[layout_of(program.values[index], self._torch) for index in program.inputs] for program in shared.programs]
        try:
            with shared.updating:
                self._take(self._over(shared.weights))
        except BaseException:
            self.close()
            raise

    def _over(self, weights: HostWeights) -> BoundPrograms:
        shared, torch, runs = self._use(), self._torch, list[Run]()
        manifest, regions, state = shared.manifest, list[HostRegion](), addressof(self._state)
        try:
            for row in manifest.regions:
                regions.append(
                    open_region(shared.bundle, row, self._weights, weights, torch, state, self._instances, fixed=shared.fixed)
                )
            for entry in manifest.entries:
                for program in entry.programs:
                    region, layouts = regions[program.steps[0].region], OutputLayouts(torch, manifest, entry, program)
                    region.check_counts(len(program.inputs), len(program.outputs))
                    runs.append((region.run, len(program.outputs), layouts, deque[RegionOutputs](maxlen=INSTANCES)))
        except BaseException:
            for region in regions:
                region.close()
            raise
        return BoundPrograms(runs, regions, weights)

    def _take(self, bound: BoundPrograms) -> None:
        self._bound = bound
        self._lock.value = self._watched(bound)

    @property
    def turn(self) -> AbstractContextManager[None]:
        return self._lock.turn

    def begin(self, stream: int | None) -> Any:
        return self._lock.value

    def end(self, stream: Any) -> None:
        """Nothing to do on the CPU."""

    def locked(self, stream: int | None) -> AbstractContextManager[Any]:
        return locked(self, stream)

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: BoundPrograms) -> RegionOutputs:
        """Raises library-refused if the outputs do not have the program's layouts."""
        run, outputs, layouts, free = stream.runs[program]
        try:
            results = free.pop()
        except IndexError:
            results = RegionOutputs(self._torch, outputs, free)
        run(addresses, self._inputs[program], results.handles)
        results.addresses = layouts.addresses(results.handles)
        return results

    def fast_path(self, program: int, caller: object) -> None:
        """None: a call on the CPU takes a thousand times what it would save."""

    def copy(self, target: int, source: int, size: int, stream: object = None) -> None:
        ctypes.memmove(target, source, size)

    # --- what lasts from call to call -------------------------------------------------------------------------

    @property
    def owner(self) -> object:
        return (self._shared, self._state)

    def address(self, weight: int, stream: BoundPrograms | None = None) -> int:
        row = self._weights[weight]
        if row.memory == STATE:
            return addressof(self._state) + row.offset
        return (self._use().weights if stream is None else stream.weights).address(row.tensor)

    def fetch(self, weight: int, stream: object = None) -> bytes:
        return ctypes.string_at(self.address(weight), span(self._weights[weight]))

    def store(self, weight: int, address: int, device: int | None, stream: object = None) -> None:
        ctypes.memmove(self.address(weight), address, span(self._weights[weight]))

    def write(self, address: int, data: bytes, stream: object = None) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int, stream: object = None) -> bytes:
        return ctypes.string_at(address, size)

    def reset(self, stream: object = None) -> None:
        for row in self._initial.rows:
            if not row.source:
                ctypes.memset(addressof(self._state) + row.offset, 0, row.size)
        self._restore()

    def update(
        self, contents: Mapping[int, Contents], sessions: Sequence[CpuBackend], files: Sequence[OpenFile], ready: Callable[[], None]
    ) -> None:
        """Does not wait: running calls keep the old weights, which are freed afterwards."""
        shared = self._use()
        with shared.updating:
            weights = shared.weights.updated([self._weights[index] for index in contents], list(contents.values()))
            for file in files:
                file.check_unchanged()
            bindings: list[tuple[CpuBackend, BoundPrograms]] = []
            try:
                for session in sessions:
                    if session._shared is not None:  # nor can it be closed before this is done: `close` needs `updating`
                        bindings.append((session, session._over(weights)))
                ready()
            except BaseException:
                for _, bound in bindings:
                    _close(bound)
                raise
            shared.weights, shared.updated = weights, True
            for session, bound in bindings:
                session._take(bound)

    @property
    def updated(self) -> bool:
        return self._use().updated

    def buffers(self, program: int) -> tuple[list[int], object]:
        row = self._use().programs[program]
        kept = self._buffers.get(program)
        if kept is None:
            kept = self._buffers.setdefault(program, [anonymous(span(row.values[index])) for index in row.inputs])
        return [addressof(memory) for memory in kept], kept

    def populate(self) -> None:
        self._use().weights.populate()

    def watch(self, profile: Profile | None) -> None:
        if profile is None and self._shared is None:
            return
        with self._use().updating:
            self._profile = profile
            if self._bound is not None:
                self._lock.value = self._watched(self._bound)

    def _watched(self, bound: BoundPrograms) -> BoundPrograms:
        profile = self._profile
        if profile is None:
            return bound
        from ..call.profile import step_names  # few programs are profiled

        manifest = self._use().manifest
        names = [step_names(manifest, entry, program)[0] for entry in manifest.entries for program in entry.programs]
        rows = zip(names, bound.runs, strict=True)
        return bound._replace(runs=[(profile.timed(name, run), *rest) for name, (run, *rest) in rows])  # type: ignore[misc]

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        """Nothing to do: torch's allocator provides a replay's memory."""

    def close(self) -> None:
        """Waits for running replays, then frees everything; weights and state live until nothing refers to them. An interrupted
        close can be repeated. In a forked process it does not wait, and leaves running code alone. Inside a call of this thread,
        memory is freed at the call's end."""
        shared = self._shared
        if shared is None:
            return
        if not self._lock.inherited:
            unused = self._lock.close()
            with shared.updating:
                if self._bound is not None and unused:
                    _close(self._bound)
                self._bound = self._lock.value = self._shared = None
                if not unused:
                    return
        self._bound = self._lock.value = self._shared = None
        self._buffers.clear()
        self._state = anonymous(0)

    def _use(self) -> HostBundle:
        if self._lock.inherited:
            raise forked(self._name)
        if self._shared is None:
            raise closed(self._name)
        return self._shared

    def _restore(self) -> None:
        for row in self._initial.rows:
            if row.source:
                ctypes.memmove(addressof(self._state) + row.offset, row.source, row.size)


def _close(bound: BoundPrograms) -> None:
    for region in bound.regions:
        region.close()
