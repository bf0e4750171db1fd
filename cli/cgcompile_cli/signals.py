"""SIGTERM and SIGHUP end a command as Ctrl-C does: what was half done is removed, and what it started ends with it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType

NAMES = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Stopped(KeyboardInterrupt):
    """Signal `number` came.  An interrupt to all that knows interrupts: `subprocess` then waits a moment for a child's own end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __str__(self) -> str:
        return NAMES[signal.Signals(self.number)]


def install() -> None:
    """From here on the first of these signals raises Stopped in the main thread, and further ones are ignored while it unwinds.
    One that whoever started this process ignores (nohup) stays ignored."""
    ours = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != ours:  # a process that was forked, and has not executed a program of its own
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for name in NAMES:
            signal.signal(name, signal.SIG_IGN)
        for process in descendants(ours):  # a terminal tells them all of Ctrl-C, whoever sends this may tell this process alone
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        raise Stopped(number)

    for name in NAMES:
        if signal.getsignal(name) is signal.SIG_DFL:
            signal.signal(name, stop)


def descendants(process: int) -> list[int]:
    """The processes that `process` started, and those that they started, as /proc knows them; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    processes = list(children.get(process, []))
    for child in processes:
        processes += children.get(child, [])  # the list grows while it is read
    return processes
