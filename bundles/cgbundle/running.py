"""Replays that run side by side, and a close that waits for them."""

from __future__ import annotations

from threading import Condition, Lock
from types import TracebackType

from .errors import ProgramClosed


class Running:
    """A context held by every replay of a program named `name`; any number may hold it.  `close` waits until none does.

    Raises ProgramClosed where it is entered after that.
    """

    __slots__ = ("_closed", "_gate", "_held", "_name")

    def __init__(self, name: str) -> None:
        self._gate, self._held, self._closed, self._name = Condition(Lock()), 0, False, name

    def __enter__(self) -> None:
        with self._gate:
            if self._closed:
                raise ProgramClosed(f"program {self._name!r} was closed")
            self._held += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._gate:
            self._held -= 1
            if self._closed:
                self._gate.notify_all()

    def close(self) -> None:
        """No one enters any more; returns when the last has left."""
        with self._gate:
            self._closed = True
            self._gate.wait_for(lambda: not self._held)
