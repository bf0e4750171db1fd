"""A loaded bundle: its entries, sessions, and state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..call.entry import Entry
from ..call.locks import closed
from ..call.outputs import Session
from ..errors import EntryMissing
from ..format.file_names import FORWARD, missing_attribute, missing_entry
from ..format.schema import KERNEL_CODE, Manifest

if TYPE_CHECKING:
    from ..call.backend import Backend
    from ..call.profile import Profile
    from ..format.safetensors_files import Mapped
    from ..process import KeptFile
    from .state import State


PER_SESSION = ("state", "inputs", "arena", "host")  # memories that every session has for itself


class Sessions:
    """The open sessions of a program, and the parts (`Session`s) that their entries share, as weak references."""

    __slots__ = ("_closed", "_lock", "_open", "_parts")

    def __init__(self) -> None:
        self._lock, self._closed = RLock(), False
        self._open, self._parts = weakref.WeakSet[Any](), weakref.WeakSet[Any]()

    def add(self, session: Any, part: Any) -> bool:
        """False after `close`: the caller has to close the session."""
        with self._lock:
            self._open.add(session)
            self._parts.add(part)
            return not self._closed

    def parts(self) -> list[Any]:
        with self._lock:
            return list(self._parts)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._open)
        for session in sessions:
            session.close()


class Program(Entry):
    """A model, ready to be called; a context manager that closes.

    `cgbundle.load` returns one that several threads may call; they wait for each other.  `session` returns one for a single thread
    at a time.

    `entries` are its callables by name: `program.decode(...)`, or `program["decode"](...)` if the program has a method of that
    name.  A call of the program itself calls `forward`, or the only entry.  `memory` has the bytes of each memory, `state` the
    state that lasts from call to call (a State), the same for all entries, and `manifest` all other data (a Manifest).  The
    attributes of Entry are those of the first entry.
    """

    def __init__(
        self, manifest: Manifest, backend: Backend, on_miss: str, outputs: str, cast: bool = False,
        self_test: KeptFile | None = None,
    ) -> None:  # fmt: skip
        first, *others = manifest.entries
        session, policies = Session(backend, self_test), (on_miss, outputs, cast)
        super().__init__(manifest, first, session, 0, *policies)
        self._others: dict[str, Entry] = {}  # must not refer to the program, which is closed when it is collected
        if others and self.name != FORWARD:
            self._others[self.name] = Entry(manifest, first, session, 0, *policies)

            def refuse(args: object, kwargs: object) -> Sequence[Any]:
                raise _no_forward("", [entry.name for entry in manifest.entries])

            self._flatten, self._flat = refuse, -1
            self._ends = (self._flatten, self._build, self._flat)
        number = len(first.programs)
        for other in others:
            self._others[other.name] = Entry(manifest, other, session, number, *policies)
            number += len(other.programs)
        self.memory = dict(manifest.memories)
        self._root: Program | None = None
        self._sessions = Sessions()
        self._finalizer = weakref.finalize(session, backend.close)
        self._finalizer.atexit = False
        if manifest.random is not None:  # every session draws its own random numbers
            try:
                self.seed(int.from_bytes(os.urandom(8), "little") >> 1)
            except BaseException:
                self.close()
                raise

    @cached_property
    def state(self) -> State:
        """What the model keeps from call to call, by name."""
        from .state import State  # few models keep any

        return State(self.manifest, self._backend)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All entries by name, in the order of the manifest."""
        return {self.name: self, **self._others}

    def __getitem__(self, name: str) -> Entry:
        """An entry by its name.  Raises EntryMissing, which is a KeyError."""
        if name not in self._others and name != self.name:
            raise missing_entry(name, self.entries)
        return self._others.get(name, self)

    def __getattr__(self, name: str) -> Entry:
        """An entry by its name.  Raises AttributeError."""
        others, first = self.__dict__.get("_others", {}), self.__dict__.get("name", "")
        if name in others or name == first:
            return others.get(name, self)  # type: ignore[no-any-return]
        raise missing_attribute(self, name, list(dict.fromkeys((first, *others))))

    # --- sessions and what lasts from call to call ------------------------------------------------------------

    def session(self) -> Program:
        """A new session of the model, with its own state, static inputs, arena and stream, and the same weights and kernels.

        Sessions run in parallel, each in one thread at a time: a second thread raises SessionBusy.  Its state starts with the
        initial values of the bundle, its random numbers with a new seed.  It is closed by `close`, with the loaded program, or when
        it is garbage collected.  Raises ProgramClosed, OutOfMemory.
        """
        root = self._root or self
        policies = (root._on_miss, "view" if root._views else "copy", root._cast)
        session = Program(root.manifest, root._backend.session(), *policies, root._session.self_test)
        session._root = root
        if not root._sessions.add(session, session._session):
            session.close()
            raise closed(root.manifest.name)
        return session

    @property
    def session_memory(self) -> dict[str, int]:
        """Bytes of each memory that a new session takes.  On a GPU they are multiples of 2 MiB, without the driver's memory for
        graphs.  On a CPU they include neither the temporaries of a call nor `buffers`.  `code`: kernel images with writable
        variables, which each session loads again, if there are any."""
        sizes = {name: size for name, size in self.memory.items() if name in PER_SESSION}
        code = self._backend.code_bytes
        return {**sizes, KERNEL_CODE: code} if code else sizes

    @property
    def updated(self) -> bool:
        """Whether `update` was called since the bundle was loaded, even with the bundle's own weights.  The self-test needs the
        loaded weights.  Raises ProgramClosed."""
        return self._backend.updated

    def reset(self) -> None:
        """Resets all state to its initial values, in order with the calls.  Random numbers continue."""
        self.state.reset()

    def seed(self, number: int) -> None:
        """Seeds the random numbers: after equal seeds, calls draw equal numbers.  Raises ValueError unless 0 <= number < 2**63,
        StateMissing if the model draws none."""
        self.state.seed(number)

    def state_bytes(self, weight: int) -> bytes:
        """The bytes of weight number `weight` of the manifest, in memory order, after the earlier calls."""
        return self.state.fetch(weight)

    def update(self, weights: str | os.PathLike[str] | Mapping[str, Any], *, partial: bool = False) -> None:
        """Replaces the weights in this program and all of its sessions.  The graphs stay.

        `weights`: a safetensors file, the index of one in several files (`model.safetensors.index.json`, as the Hugging Face Hub
        has it), a folder with one of these, another bundle, or a mapping of names to tensors (NumPy, torch, CuPy, DLPack).  Names,
        dtypes and shapes are those of the model's state_dict.  Of tied weights one is enough.  `partial`: other weights stay; False
        needs all weights.

        Everything is read and checked first: if this raises, nothing has changed.  A call that began before uses the old weights to
        its end.  A call that begins after this has returned uses the new weights, in every session.  The caller has to order calls
        inside its own CUDA graphs.  State does not change.

        Raises update-invalid for wrong weights, update-refused for a weight that is part of the code (`inspect` lists them),
        ProgramClosed, OutOfMemory.
        """
        update_all([self], weights, partial=partial)

    def warmup(self, *int_keys: tuple[int, ...]) -> None:
        """Does the extra work of first calls: reads the weights, builds the graphs that `lazy=True` deferred, and makes a call of
        each of `int_keys` (default: all recorded ones of all entries) with the inputs of the self-test.

        `int_keys` are those of `forward`, or of the only entry; for another entry call `program.decode.warmup(key)`.  State and
        random numbers do not change.  Earlier views become stale.  OpenMP's threads belong to the calling thread, so call it in the
        thread that serves.  Raises key-missing, EntryMissing, and the errors of a call.
        """
        from ..call.warmup import warm_up  # few programs ask for it

        if int_keys and self._others and self.name != FORWARD:
            raise _no_forward("warmup", self.entries)
        if int_keys:
            return super().warmup(*int_keys)
        entries = self.entries.values()
        warm_up(self._session, self.manifest, [(entry.spec, key, entry.replay) for entry in entries for key in entry.int_keys])

    def profile(self) -> Profile:
        """Times the calls inside `with program.profile() as profile:`, and each of their steps.

        `print(profile)` shows a table, `profile.save("trace.json")` writes a Chrome trace, which chrome://tracing and Perfetto
        read, `profile.rows()` and `profile.spans` are the numbers.  Steps on a GPU are timed by two events each.
        """
        from ..call.profile import Profile  # few programs are profiled

        def watch(profile: Profile | None) -> None:
            self._backend.watch(profile)
            for entry in self.entries.values():
                entry.watch(profile)

        return Profile(self.manifest.name, watch)

    def open_self_test(self) -> Mapped:
        """The self-test of the loaded bundle.  The caller closes it.  For verification.  Raises ProgramClosed, weights-invalid."""
        from ..format.file_names import SELF_TEST  # no call needs it
        from ..format.safetensors_files import Mapped

        if self._session.self_test is None:
            raise closed(self.manifest.name)
        return Mapped(self._session.self_test.descriptor, SELF_TEST)

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        """Overwrites with `byte` the memory whose contents no replay may depend on: results must not change.  `reserved`: also
        donated outputs, which a later call may read.  For verification."""
        self._backend.poison(byte, reserved=reserved)

    def close(self) -> None:
        """Waits for running calls, then frees all memory.  Closing the loaded program closes its sessions.  Calls of a closed
        program raise ProgramClosed; closing twice does nothing."""
        if self._backend.device is not None:
            for epoch in (self._session.epoch, *[entry.epoch for entry in self.entries.values()]):
                epoch.closed = True  # views of GPU memory become stale here, also those that a running call returns
        self._sessions.close()
        self._backend.close()
        for entry in (self, *self._others.values()):
            entry.forget()
        self._session.self_test = None
        self._finalizer.detach()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        keys = ", ".join(map(str, self.int_keys[:6])) + (", ..." if len(self.int_keys) > 6 else "")
        return f"<cgbundle.Program {self.manifest.name!r} for {self.manifest.target.arch}, int_keys {keys}>"


def update_all(programs: Sequence[Program], weights: object, *, partial: bool) -> None:
    """`Program.update` for copies of a program and their sessions, all or none."""
    from ..call.update import update  # few programs are updated

    roots = [program._root or program for program in programs]
    sessions = [[root._session, *root._sessions.parts()] for root in roots]  # not collected during the update
    update(roots[0].manifest, [[part.backend for part in parts] for parts in sessions], weights, partial=partial)


def _no_forward(method: str, names: Iterable[str]) -> EntryMissing:
    first, *_ = listed = list(names)
    text = f"the bundle has the entries {', '.join(listed)}, and none is called {FORWARD}"
    return EntryMissing("entry-missing", text, f"call program.{first}{f'.{method}' if method else ''}(...)")
