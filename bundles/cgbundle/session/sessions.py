"""The sessions of a loaded bundle: one that `load` gives, and those that it opens."""

from __future__ import annotations

import os
import weakref
from threading import Lock
from typing import TYPE_CHECKING

from ..errors import ProgramClosed

if TYPE_CHECKING:
    from ..program import Program

OWN = ("state", "inputs", "arena", "host")
"""Memories that every session has for itself."""


class Family:
    """A loaded program and its sessions.  Sessions keep the program that they came from; it does not keep them, so that one that is
    forgotten is collected."""

    __slots__ = ("_closed", "_lock", "_members", "_root")

    def __init__(self, root: Program | None = None) -> None:
        self._lock, self._root, self._closed = Lock(), root, False
        self._members: weakref.WeakSet[Program] = weakref.WeakSet()

    def open(self, program: Program) -> Program:
        """A session beside `program`, whose family this is."""
        root = self._root or program
        made = type(root)(root.manifest, root._backend.session(), root._on_miss, "view" if root._views else "copy")
        made._family = Family(root)
        with root._family._lock:
            late = root._family._closed
            root._family._members.add(made)
        try:
            if late:
                raise ProgramClosed("program-closed", f"program {root.manifest.name!r} was closed")
            begin(made)
        except BaseException:
            made.close()
            raise
        return made

    def close(self, program: Program) -> None:
        """Closes the sessions of the program that was loaded; a session has none."""
        with self._lock:
            self._closed = True
            members = list(self._members)
        for member in members:
            member.close()


def begin(program: Program) -> None:
    """Gives a session random numbers of its own."""
    if program.manifest.random >= 0:
        program.seed(int.from_bytes(os.urandom(8), "little") >> 1)
