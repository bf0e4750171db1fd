"""Creates a temporary folder for a build.

A killed process (SIGKILL, out of memory) removes nothing, and its files may be as large as a model.  So each folder has a lock
(flock), which ends with the processes that hold it.  The next build removes folders without a lock.
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
"""Seconds during which removing the folder is retried."""

YOUNG = 60.0
"""Seconds after its creation during which a folder may have no lock yet."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Creates a folder (mode 0700) and removes it at the end.  Worker processes of compilers may still write to it briefly, so
    removal is retried for PATIENCE seconds.  A folder that remains is no error, because the build is done.  Raises
    scratch-unwritable if no folder can be created, and disk-full if the block fails because its disk is full."""
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
    """Locks a folder.  Yields False if another process has the lock, or the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        acquired = False
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            acquired = True
        yield acquired
    finally:
        os.close(handle)  # a forked process with the same descriptor keeps the lock until its end


def _remove_leftovers(parent: Path) -> None:
    """Removes this user's folders in `parent` whose processes have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another build may have removed it
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and time.time() - status.st_mtime > YOUNG:
                with _locked(folder) as acquired:
                    if acquired:
                        shutil.rmtree(folder, ignore_errors=True)
