"""The sessions that a loaded program has opened."""

from __future__ import annotations

import weakref
from threading import Lock
from typing import Any

PER_SESSION = ("state", "inputs", "arena", "host")
"""Memories that every session has for itself."""


class Sessions:
    """Sessions keep the program that they came from; it does not keep them, so that one that is forgotten is collected."""

    __slots__ = ("_closed", "_lock", "_open")

    def __init__(self) -> None:
        self._lock, self._closed = Lock(), False
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, session: Any) -> bool:
        """False after `close`: the session has to be closed by whoever opened it."""
        with self._lock:
            self._open.add(session)
            return not self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._open)
        for session in sessions:
            session.close()
