"""Who may use a program's memory: replays side by side, one after the other, or of one thread alone; and a close that waits."""

from __future__ import annotations

from threading import Condition, Lock, RLock, current_thread, enumerate, get_ident
from types import TracebackType
from typing import Any, Protocol

from ..errors import ProgramClosed, SessionBusy
from .forks import FORKS, forked


def closed(name: str) -> ProgramClosed:
    """The error of whoever uses a closed program."""
    return ProgramClosed("program-closed", f"program {name!r} was closed")


class SharedLock:
    """A context held by every replay of a program named `name`; any number may hold it.  `close` waits until none does; who enters
    after that gets ProgramClosed, and in a forked process process-forked.  Who enters is given `value`, as it is then."""

    __slots__ = ("_closed", "_forks", "_gate", "_held", "_name", "value")

    def __init__(self, name: str) -> None:
        self._gate, self._held, self._closed, self._name = Condition(Lock()), 0, False, name
        self.value: Any = None
        self._forks = FORKS.number

    @property
    def inherited(self) -> bool:
        """Whether this process was forked since: who held the lock then is gone and never lets it go."""
        return self._forks != FORKS.number

    def __enter__(self) -> Any:
        if self._forks != FORKS.number:
            raise forked(self._name)
        with self._gate:
            if self._closed:
                raise closed(self._name)
            self._held += 1
            return self.value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._gate:
            self._held -= 1
            if self._closed:
                self._gate.notify_all()

    def close(self) -> bool:
        """No one enters any more; returns when the last has left.  True for who comes first, and has to free what it guards."""
        with self._gate:
            first, self._closed = not self._closed, True
            self._gate.wait_for(lambda: not self._held)
            return first


class AnyLock(Protocol):
    """A lock, of threading's kind or `SessionLock`."""

    def acquire(self) -> object: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...


class SessionLock:
    """The lock of a session of the program named `name`: one thread's at a time.  Another one that comes meanwhile is told so and
    does not wait.  `inner` is the lock itself, for who may wait; `ending` is set by who waits for it to close the session.

    `updates` is held by whoever takes the inner lock for a moment, without being a user of the session: for that one waits."""

    __slots__ = ("_holder", "_name", "_updates", "ending", "inner")

    def __init__(self, name: str, updates: AnyLock | None = None) -> None:
        self.inner, self._name, self._holder, self.ending = RLock(), name, 0, False
        self._updates = updates or RLock()

    def acquire(self) -> None:
        """Raises SessionBusy, and ProgramClosed while the session is being closed."""
        if not self.inner.acquire(blocking=False):
            self._acquire_after_update()
        self._holder = get_ident()

    def _acquire_after_update(self) -> None:
        with self._updates:
            if self.inner.acquire(blocking=False):
                return
            if self.ending:
                raise closed(self._name)
            holder = next((thread.name for thread in enumerate() if thread.ident == self._holder), "another")
            raise SessionBusy(
                "session-busy",
                f"a session of program {self._name!r} is in use by thread {holder!r}, and thread {current_thread().name!r} used it "
                "meanwhile",
            )

    def release(self) -> None:
        self.inner.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.inner.release()


class ExclusiveLock:
    """`SharedLock` for replays that share memory: one at a time.  `alone`: a session's, whose memory is one thread's at a time.
    Raises ProgramClosed, SessionBusy and process-forked."""

    __slots__ = ("_closed", "_forks", "_gate", "_lock", "_name", "_session", "value")

    def __init__(self, name: str, *, alone: bool) -> None:
        self._session = exclusive = SessionLock(name)
        self._gate, self._closed, self._name = exclusive.inner, False, name
        self._lock = exclusive if alone else self._gate
        self._forks = FORKS.number
        self.value: Any = None

    @property
    def inherited(self) -> bool:
        """As of `SharedLock`."""
        return self._forks != FORKS.number

    def __enter__(self) -> Any:
        if self._forks != FORKS.number:
            raise forked(self._name)
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise closed(self._name)
        return self.value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def close(self) -> bool:
        """As `SharedLock.close`."""
        self._session.ending = True
        with self._gate:
            first, self._closed = not self._closed, True
            return first
