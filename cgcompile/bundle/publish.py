"""Writes a bundle atomically: in a staging directory beside its destination, which is synced and then renamed.

One process at a time writes to a destination.  It holds a lock (flock) on a file beside the destination.  The kernel releases the
lock when the process ends, also if it runs in another container.  The holder of the lock thus knows that all other staging
directories are leftovers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

NOREPLACE, EXCHANGE = 1, 2
"""Flags of renameat2 (linux/fs.h)."""

AT_FDCWD = -100
"""The current directory, for renameat2 (fcntl.h)."""

RENAMEAT2 = {"x86_64": 316, "aarch64": 276}
"""The number of the system call by machine, for a C library without the function (glibc before 2.28)."""

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""Errors of renameat2 if the file system, an old kernel or a seccomp filter does not support it or its flags."""

UNLOCKABLE = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})
"""Errors of flock on a file system without locks."""


@contextmanager
def staged(destination: Path, *, replace: bool) -> Iterator[Path]:
    """Gives a new directory beside `destination`.  It becomes `destination` if the block succeeds, and is removed if it fails.

    With `replace`, an existing bundle stays until the new one is complete.  Then renameat2 exchanges the two names in one step: a
    reader finds the old or the new bundle at any moment.  If the file system or kernel does not support this, two renames are used.
    Between them, for some microseconds, `destination` does not exist.

    The next process that writes to `destination` removes the leftovers of a killed process.  On a file system without locks (some
    NFS mounts) they stay, because they could belong to a running process.

    Raises BlockingIOError if another process writes to `destination`.  Without `replace`, raises FileExistsError if `destination`
    exists at the start or at the end.
    """
    destination = destination.absolute()  # the model's code may change the current directory
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked(destination) as has_lock:
        if has_lock:
            _sweep(destination)
        if not replace and os.path.lexists(destination):
            raise _exists(destination)
        stage = destination.parent / f".{destination.name}.{uuid4().hex[:8]}.building"
        try:
            stage.mkdir()
            yield stage
            for folder, _, names in os.walk(stage):
                for name in (*names, "."):
                    _sync(Path(folder, name))
            _publish(stage, destination, replace)
            _sync(destination.parent)
        finally:
            _remove(stage)  # an incomplete bundle, or the replaced one


def _publish(stage: Path, destination: Path, replace: bool) -> None:
    """Renames the stage to the destination.  A replaced bundle then has the name of the stage."""
    if replace and os.path.lexists(destination):
        with suppress(FileNotFoundError):  # another process removed the destination
            if not _rename(stage, destination, EXCHANGE):
                _exchange_in_steps(stage, destination)
            return
    try:
        if not _rename(stage, destination, NOREPLACE):
            stage.rename(destination)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists(destination) from None
        raise


def _exchange_in_steps(stage: Path, destination: Path) -> None:
    old = stage.with_suffix(".old")  # exists only between the two renames; `_sweep` restores it
    destination.rename(old)
    try:
        stage.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    old.rename(stage)


def _exists(destination: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(destination))


def _rename(source: Path, target: Path, flags: int) -> bool:
    """Calls renameat2.  Returns False if the system or the file system does not support it."""
    library = ctypes.CDLL(None, use_errno=True)
    paths = ctypes.c_char_p(os.fsencode(source)), ctypes.c_char_p(os.fsencode(target))
    arguments = AT_FDCWD, paths[0], AT_FDCWD, paths[1], ctypes.c_uint(flags)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(*arguments)
    elif platform.machine() in RENAMEAT2 and hasattr(library, "syscall"):
        failed = library.syscall(ctypes.c_long(RENAMEAT2[platform.machine()]), *arguments)
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fspath(source), None, os.fspath(target))


@contextmanager
def _locked(destination: Path) -> Iterator[bool]:
    """Holds the lock of the destination.  Gives False on a file system without locks.  Raises BlockingIOError if another process
    holds it."""
    path = destination.parent / f".{destination.name}.lock"
    handle, has_lock = _lock(path)
    try:
        yield has_lock
    finally:
        with suppress(OSError):  # a file of another user in a sticky directory
            path.unlink()  # before unlocking: a process that waits for this file sees that it was unlinked
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may still have the descriptor
        os.close(handle)


def _lock(path: Path) -> tuple[int, bool]:
    while True:
        handle = _open(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False)):
                    return handle, True
        except OSError as error:
            if error.errno in UNLOCKABLE:
                return handle, False
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(error.errno, error.strerror, os.fspath(path)) from None
            raise
        os.close(handle)  # another process unlinked the file between open and flock


def _open(path: Path) -> int:
    """Opens the lock file, or creates it.  NFS needs write access for a lock, but a file of another user may be read-only."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
    except PermissionError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY | flags)


def _sweep(destination: Path) -> None:
    """Removes the leftovers of killed processes.  The caller must hold the lock."""
    pattern = re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.(building|old)")
    for leftover in [path for path in destination.parent.iterdir() if pattern.fullmatch(path.name)]:
        if leftover.suffix == ".old" and not os.path.lexists(destination):
            leftover.rename(destination)  # killed between the two renames: restore the old bundle
        else:
            _remove(leftover)


def _remove(path: Path) -> None:
    """Removes a directory, a link or a file: `replace` may have renamed any of these."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
