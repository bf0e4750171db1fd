"""Makes SIGTERM and SIGHUP end a command as Ctrl-C does: unfinished files are removed, and child processes end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType

NAMES = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Stopped(KeyboardInterrupt):
    """Signal `number` was received.  It is a KeyboardInterrupt, so that `subprocess` waits briefly for a child's end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __str__(self) -> str:
        return NAMES[signal.Signals(self.number)]


def install() -> None:
    """Installs handlers for SIGTERM and SIGHUP: the first signal raises Stopped in the main thread, and later ones are ignored.  A
    signal that was ignored at the start (nohup) stays ignored."""
    own_pid = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own_pid:  # a forked process without exec
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for name in NAMES:
            signal.signal(name, signal.SIG_IGN)
        for process in descendants(own_pid):  # Ctrl-C reaches all processes, but these signals may be sent to this one only
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        raise Stopped(number)

    for name in NAMES:
        if signal.getsignal(name) is signal.SIG_DFL:
            signal.signal(name, stop)


def descendants(process: int) -> list[int]:
    """Returns all child processes of `process`, recursively, from /proc; [] without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    processes = list(children.get(process, []))
    for child in processes:
        processes += children.get(child, [])  # the list grows while it is read
    return processes
