"""The sessions that a loaded program has opened."""

from __future__ import annotations

import weakref
from threading import RLock
from typing import Any

PER_SESSION = ("state", "inputs", "arena", "host")
"""Memories that every session has for itself."""


class Sessions:
    """Sessions keep the program that they came from; it does not keep them, so that one that is forgotten is collected."""

    __slots__ = ("_closed", "_lock", "_open", "_parts")

    def __init__(self) -> None:
        self._lock, self._closed = RLock(), False
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, session: Any, part: Any) -> bool:
        """`part` is what a session's entries share, which may outlive it.  False after `close`: the session has to be closed by
        whoever opened it."""
        with self._lock:
            self._open.add(session)
            self._parts.add(part)
            return not self._closed

    def parts(self) -> list[Any]:
        """The parts of those that are open.  None of them is collected while the list is held."""
        with self._lock:
            return list(self._parts)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._open)
        for session in sessions:
            session.close()
