"""A folder for the time of a build.

A process that is killed (SIGKILL, out of memory) removes nothing, and what it leaves may be as large as a model.  So each folder
has a lock of the kernel's (flock), which ends with the processes that hold it, and the next build removes those without.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import BuildError
from .disk_space import FULL, SCRATCH, disk_full, space_told

PREFIX = "cgcompile-scratch-"

PATIENCE = 3.0
"""Seconds that the folder's removal is tried again."""

YOUNG = 60.0
"""Seconds after its making in which a folder may have no lock yet."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, this user's alone (mode 0700), removed at the end.  Compilers' worker processes may outlive the process that
    started them by a moment and still write there.  So removing is tried again; what is left after PATIENCE stays, since the build
    itself is done.  Raises scratch-unwritable where there can be none, and disk-full for what fails since its disk is full."""
    _remove_leftovers(Path(tempfile.gettempdir()))
    folder = _new_folder()
    with _locked(folder):
        try:
            with space_told(folder, SCRATCH):
                yield folder
        finally:
            end = time.monotonic() + PATIENCE
            shutil.rmtree(folder, ignore_errors=True)
            while folder.exists() and time.monotonic() < end:
                time.sleep(0.05)
                shutil.rmtree(folder, ignore_errors=True)


def _new_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(Path(tempfile.gettempdir()), SCRATCH) from error
        where = f"{error.filename}: " if error.filename else ""
        raise BuildError("scratch-unwritable", f"{where}{error.strerror}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds a folder's lock; False where another process has it, or the file system has none."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        alone = False
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        yield alone
    finally:
        os.close(handle)  # a forked process that has the descriptor, too, keeps the lock to its own end


def _remove_leftovers(parent: Path) -> None:
    """Removes this user's folders below `parent` whose processes have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # whoever removes it meanwhile is as good
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if ours and time.time() - status.st_mtime > YOUNG:
                with _locked(folder) as alone:
                    if alone:
                        shutil.rmtree(folder, ignore_errors=True)
