"""A *turn* is a thread's use of a program's memory. Turns are concurrent, one at a time, or of one thread only, and `close` waits
for them. An interrupt (Ctrl-C) may arrive after every function call and before the first line of a function. So locks are acquired
inside `try`, and released by C functions, before which no interrupt arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock, current_thread, enumerate, get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ProgramClosed, SessionBusy
from ..process import FORKS, forked

if TYPE_CHECKING:
    from .backend import Backend

Result = TypeVar("Result")


def closed(name: str) -> ProgramClosed:
    return ProgramClosed("program-closed", f"program {name!r} was closed")


class Lock:
    """Base of program locks: the program's `name`, whether it is `closed`, and a `value` of the backend (cpu: bound programs)."""

    __slots__ = ("_forks", "closed", "name", "value")

    def __init__(self, name: str) -> None:
        self.name, self.closed, self._forks = name, False, FORKS.number
        self.value: Any = None

    @property
    def inherited(self) -> bool:
        """Whether the process was forked after the lock was created: the holder's thread may not exist here."""
        return self._forks != FORKS.number

    def check_fork(self) -> None:
        if self._forks != FORKS.number:
            raise forked(self.name)


class Turn:
    """A thread's use of `lock`, as a context manager. `take` and `release` are its parts, for `gpu.fast_path`, which avoids the
    context. `owned`: whether this thread holds it. Raises ProgramClosed."""

    __slots__ = ("__exit__", "_lock", "lock", "owned", "release", "take")

    __exit__: Callable[..., None]  # a C function

    def __init__(self, owner: Lock, take: Callable[[], object] | None = None) -> None:
        lock: Any = RLock()
        self._lock, self.lock, self.owned = owner, lock, lock._is_owned
        self.take, self.release, self.__exit__ = take or lock.acquire, lock.release, lock.__exit__

    def __enter__(self) -> None:
        try:
            self.take()
            if self._lock.closed:
                raise closed(self._lock.name)
        except BaseException:
            try:  # noqa: SIM105  a context manager in Python could be interrupted
                self.release()
            except RuntimeError:  # interrupted before the lock was taken, or another thread has it
                pass
            raise

    def wait(self) -> bool:
        """Waits for the running call; returns False at once if that is in this thread."""
        if self.owned():
            return False
        with self.lock:
            return True


INSIDE = nullcontext()
"""The turn of a call inside a call of the same thread, as in a signal handler."""


class ExclusiveLock(Lock):
    """Turns one at a time (`cpu.backend.SharedLock`: concurrent turns). `alone`: a session's lock, which refuses a second thread
    instead of waiting, but waits for a holder of `updates`. `inner`: the lock itself. Raises ProgramClosed, SessionBusy,
    process-forked."""

    __slots__ = ("_ending", "_holder", "_turn", "_updates")

    def __init__(self, name: str, *, alone: bool, updates: AbstractContextManager[Any] | None = None) -> None:
        super().__init__(name)
        self._turn = Turn(self, self._take if alone else None)
        self._holder, self._ending = 0, False
        self._updates = updates or RLock()

    @property
    def inner(self) -> Any:
        return self._turn.lock

    @property
    def plain(self) -> Turn:
        """The turn without the checks for a fork and for a nested call."""
        return self._turn

    @property
    def turn(self) -> AbstractContextManager[None]:
        self.check_fork()
        return INSIDE if self._turn.owned() else self._turn

    def end(self) -> None:
        """From now on, threads that are refused get ProgramClosed instead of SessionBusy."""
        self._ending = True

    def close(self) -> bool:
        """Refuses new turns, and returns after the others have ended. False inside a call of this thread (as in a signal handler),
        whose memory must stay."""
        self._ending = True
        nested = self._turn.owned()
        with self.inner:
            self.closed = True
            return not nested

    def _take(self) -> None:
        """Raises SessionBusy, and ProgramClosed while the session is being closed. After any other exception the lock may be
        held."""
        if not self.inner.acquire(blocking=False):
            with self._updates:
                if not self.inner.acquire(blocking=False):
                    if self._ending:
                        raise closed(self.name)
                    holders = (f"thread {thread.name!r}" for thread in enumerate() if thread.ident == self._holder)
                    text = f"is in use by {next(holders, 'another thread')}, and thread {current_thread().name!r} tried to use it"
                    raise SessionBusy("session-busy", f"a session of program {self.name!r} {text}")
        self._holder = get_ident()


@contextmanager
def locked(backend: Backend, stream: int | None) -> Iterator[Any]:
    with backend.turn:
        handle = backend.begin(stream)
        try:
            yield handle
        finally:
            backend.end(handle)


def during(backend: Backend, stream: int | None, body: Callable[[Any], Result]) -> Result:
    """Runs `body` with the result of `begin`, in a turn of the backend on `stream`. Unlike `locked`, safe against interrupts."""
    with backend.turn:
        handle = backend.begin(stream)
        try:
            return body(handle)
        finally:
            backend.end(handle)
