"""Writing a bundle so that it is whole or absent: staged beside its destination, synced, exchanged with what stands there.

One process at a time writes to a destination.  It holds a lock of the kernel's (flock) on a file beside the destination, and the
lock ends with the process, whichever container it ran in.  So whoever has the lock knows that all other stages are leftovers.
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
"""The current folder, for renameat2 (fcntl.h)."""

RENAMEAT2 = {"x86_64": 316, "aarch64": 276}
"""The system call's number by machine, for a C library without the function (glibc before 2.28)."""

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""What a file system, an old kernel and a container's filter say of renameat2 or its flags."""

UNLOCKABLE = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})
"""What a file system without locks says of flock."""


@contextmanager
def staged(destination: Path, *, replace: bool) -> Iterator[Path]:
    """A fresh directory beside `destination`, which takes its place when the block ends well and is removed when it does not.

    With `replace`, an existing bundle stays in place until the new one is whole.  Then the two exchange names in one step
    (renameat2), so that a reader by path finds the old or the new one at any moment.  Where the file system or kernel cannot do
    that, two renames follow each other, and nothing stands at the destination for some microseconds.

    What a killed process left is removed by the next one to write to this destination.  Where the file system has no locks (some
    NFS mounts) leftovers stay: nobody can tell them from the stage of a running process.

    Raises BlockingIOError while another process writes to `destination`.  Without `replace`, raises FileExistsError where something
    is there: at once, or at the end if it came meanwhile.
    """
    destination = destination.absolute()  # a model's code may change the current folder meanwhile
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked(destination) as alone:
        if alone:
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
            _remove(stage)  # what was half written, or the bundle that was replaced


def _publish(stage: Path, destination: Path, replace: bool) -> None:
    """Gives the stage its final name; what it replaces has the stage's name then."""
    if replace and os.path.lexists(destination):
        with suppress(FileNotFoundError):  # it was removed meanwhile
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
    old = stage.with_suffix(".old")  # between the two renames alone: `_sweep` puts it back
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
    """renameat2 with flags; False where this system or file system cannot."""
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
    """Holds the destination's lock; False where the file system has none.  Raises BlockingIOError while another process has it."""
    path = destination.parent / f".{destination.name}.lock"
    handle, alone = _lock(path)
    try:
        yield alone
    finally:
        with suppress(OSError):  # another user's file, in a folder where each may remove only their own
            path.unlink()  # before the lock ends: whoever waits with this file open sees that it has no name any more
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may still have the descriptor
        os.close(handle)


def _lock(path: Path) -> tuple[int, bool]:
    """A descriptor of the lock's file, and whether it is locked."""
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
        os.close(handle)  # its last holder removed it between the two calls


def _open(path: Path) -> int:
    """The lock's file, made if need be.  NFS locks only what is open for writing; another user's file may be readable alone."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
    except PermissionError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY | flags)


def _sweep(destination: Path) -> None:
    """Removes what killed processes left; the caller has the lock."""
    ours = re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.(building|old)")
    for leftover in [path for path in destination.parent.iterdir() if ours.fullmatch(path.name)]:
        if leftover.suffix == ".old" and not os.path.lexists(destination):
            leftover.rename(destination)  # killed between the two renames: the old bundle is whole, put it back
        else:
            _remove(leftover)


def _remove(path: Path) -> None:
    """Whatever it is: `replace` may have moved a link or a plain file aside."""
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
