"""Who may use a program's memory: replays side by side, one after the other, or of one thread alone; and a close that waits.

An interrupt, as of Ctrl-C, may land behind every call of a function and before the first line of one.  So a lock is taken where an
exception gives it back whether or not it was taken, and given back by a function of C, which nothing lands before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock, current_thread, enumerate, get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ProgramClosed, SessionBusy
from .forks import FORKS, forked

if TYPE_CHECKING:
    from .backend import Backend

Result = TypeVar("Result")


def closed(name: str) -> ProgramClosed:
    """The error of whoever uses a closed program."""
    return ProgramClosed("program-closed", f"program {name!r} was closed")


class Lock:
    """What programs' locks have in common: the program's `name`, whether it is `closed`, and a `value` that replays use, as it is
    when they begin."""

    __slots__ = ("_forks", "closed", "name", "value")

    def __init__(self, name: str) -> None:
        self.name, self.closed, self._forks = name, False, FORKS.number
        self.value: Any = None

    @property
    def inherited(self) -> bool:
        """Whether this process was forked since: who held the lock then is gone and never lets it go."""
        return self._forks != FORKS.number

    def check_fork(self) -> None:
        """Raises process-forked."""
        if self._forks != FORKS.number:
            raise forked(self.name)


class Turn:
    """A thread's use of `lock`, as a context.  `take` and `release` are its parts, for who cannot afford a context: see
    `gpu.fast_path`.  `owned` says whether this thread is in the middle of one.  Raises ProgramClosed."""

    __slots__ = ("__exit__", "_lock", "lock", "owned", "release", "take")

    __exit__: Callable[..., None]  # of C

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
            try:  # noqa: SIM105  a context of Python's could be interrupted
                self.release()
            except RuntimeError:  # interrupted before the lock was taken, or somebody else has it
                pass
            raise

    def wait(self) -> bool:
        """Returns when the call that runs has ended; False, at once, where it is this thread's: it has to go on for that."""
        if self.owned():
            return False
        with self.lock:
            return True


INSIDE = nullcontext()
"""The turn of a call inside of a call of the same thread, as a signal's handler makes: it has the lock."""


class ExclusiveLock(Lock):
    """The turns of replays that share memory: one at a time (`cpu.backend.SharedLock` has those that do not).  `alone`: a
    session's, whose memory is one thread's at a time; another one that comes meanwhile is told so and does not wait.  Raises
    ProgramClosed, SessionBusy and process-forked.

    `inner` is the lock itself, for who may wait.  `updates` is held by whoever takes it for a moment without being a user of the
    session: for that one waits."""

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
        """The turn that nobody has yet: no fork was asked for, nor whether this thread is inside."""
        return self._turn

    @property
    def turn(self) -> AbstractContextManager[None]:
        """A turn of this thread."""
        self.check_fork()
        return INSIDE if self._turn.owned() else self._turn

    def end(self) -> None:
        """Who is refused from now on, because another thread holds the lock, is told that the session is being closed."""
        self._ending = True

    def close(self) -> bool:
        """No one enters any more; returns when the others have left.  False where a call of this very thread goes on behind it, as
        where the handler of a signal closes: what it uses must stay."""
        self._ending = True
        left = self._turn.owned()
        with self.inner:
            self.closed = True
            return not left

    def _take(self) -> None:
        """Raises SessionBusy, and ProgramClosed while the session is being closed.  The lock may have been taken where this raises
        anything else."""
        if not self.inner.acquire(blocking=False):
            self._take_after_update()
        self._holder = get_ident()

    def _take_after_update(self) -> None:
        with self._updates:
            if self.inner.acquire(blocking=False):
                return
            if self._ending:
                raise closed(self.name)
            holder = next((thread.name for thread in enumerate() if thread.ident == self._holder), "another")
            raise SessionBusy(
                "session-busy",
                f"a session of program {self.name!r} is in use by thread {holder!r}, and thread {current_thread().name!r} used it "
                "meanwhile",
            )


def during(backend: Backend, stream: int | None, body: Callable[[Any], Result]) -> Result:
    """What `body` gives, in a turn of the backend whose work goes to `stream`; it is given what `begin` gives."""
    with backend.turn:
        handle = backend.begin(stream)
        try:
            return body(handle)
        finally:
            backend.end(handle)


@contextmanager
def locked(backend: Backend, stream: int | None) -> Iterator[Any]:
    """`Backend.locked`."""
    with backend.turn:
        handle = backend.begin(stream)
        try:
            yield handle
        finally:
            backend.end(handle)
