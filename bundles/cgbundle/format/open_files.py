"""Opens the files of a bundle: follows only links of the Hugging Face Hub's cache, waits for no pipe, and reads no more than the
manifest says. Also runs cleanup when an object is collected."""

from __future__ import annotations

import errno
import os
import stat
from itertools import chain, count
from operator import countOf
from types import MethodType
from weakref import ref

from ..errors import BundleError

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

CHUNK = 4 << 20  # bytes read at a time
FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
FOLDER = FILE | os.O_DIRECTORY

BLOBS = "../blobs/"  # before the SHA-1 or SHA-256 in a link of huggingface_hub's cache
DAMAGE = {errno.ENOENT: "missing", errno.ENOTDIR: "missing", errno.ELOOP: "a symbolic link, which a bundle must not hold"}
"""Messages by the error number of an open that failed."""

NO_PATH = (errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)  # errors of a path that the system does not accept
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors that say nothing about the bundle


class KeptFile:
    """A duplicate of a file descriptor, closed when this object is collected."""

    __slots__ = ("__weakref__", "descriptor")

    def __init__(self, descriptor: int) -> None:
        opened = list[int]()
        when_gone(self, map(os.close, opened))
        opened.extend(map(os.dup, (descriptor,)))
        self.descriptor = opened[0]


def open_directory(path: str) -> int:
    """Opens a directory that a user names; follows links. Raises bundle-missing, not-a-bundle."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except FileNotFoundError:
        if not os.path.lexists(path):
            raise BundleError("bundle-missing", f"{path}: no such bundle") from None
        raise BundleError("not-a-bundle", f"{path}: a broken symbolic link, not a bundle") from None
    except NotADirectoryError:
        raise BundleError("not-a-bundle", f"{path}: a file, not a bundle directory") from None
    except ValueError:
        raise BundleError("not-a-bundle", f"{path!r}: no path") from None
    except OSError as error:
        if error.errno not in NO_PATH:
            raise
        raise BundleError("not-a-bundle", f"{path[:200]}: {error.strerror}") from None


def open_file(name: str, folder: int) -> int:
    """Opens a plain file, also through a link of the Hub's cache. Raises file-damaged without the file's name, which the caller
    adds."""
    try:
        descriptor = open_entry(name, FILE, folder)
    except BundleError as error:
        place = _cached(name, folder) if str(error) == DAMAGE[errno.ELOOP] else ""
        if not place:
            raise
        descriptor = open_entry(place, FILE, folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleError("file-damaged", "not a file")
    return descriptor


def open_entry(name: str, flags: int, folder: int) -> int:
    """Opens an entry of an open directory without following a link. Raises file-damaged, as `open_file`."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in FULL:
            raise
        if error.errno == errno.ENOTDIR and stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            error.errno = errno.ELOOP
        raise BundleError("file-damaged", DAMAGE.get(error.errno or 0) or f"cannot be read: {error.strerror}") from None


def _cached(name: str, folder: int) -> str:
    """The target of a link of the Hub's cache, from a snapshot to a file in `blobs/`; "" for any other link."""
    place = os.readlink(name, dir_fd=folder)
    up, between, digest = place.rpartition(BLOBS)
    known = between and up == "../" * (len(up) // 3) and len(digest) in (40, 64) and set(digest) <= set("0123456789abcdef")
    return place if known else ""


def pieces(descriptor: int, name: str, size: int) -> Iterator[bytes]:
    """Yields the contents in pieces. Raises file-damaged unless the file has `size` bytes."""
    done = 0
    while piece := os.pread(descriptor, min(CHUNK, size - done) + 1, done):
        done += len(piece)
        if done > size:
            break
        yield piece
    if done != size:
        raise BundleError("file-damaged", f"{name}: {os.fstat(descriptor).st_size} bytes, expected {size}")


def copied(descriptor: int) -> int:
    """Copies a file into memory (memfd), closes it, and returns the copy's descriptor."""
    size = os.fstat(descriptor).st_size
    copy = os.memfd_create("cgbundle-weights", os.MFD_CLOEXEC)
    try:
        done = 0
        while done < size and (step := os.sendfile(copy, descriptor, done, size - done)):
            done += step
    except BaseException:
        os.close(copy)
        raise
    os.close(descriptor)
    return copy


# --- cleanup after an object is collected, by C functions only --------------------------------------------------------
#
# An interrupt (a signal handler that raises, PyThreadState_SetAsyncExc) may arrive wherever Python code runs.  In `__del__`, and in
# a `weakref` callback written in Python, its exception is printed and lost, and the rest of the cleanup does not run.

_WAITING: dict[int, tuple[ref[Any], bool]] = {}
"""Weak references, and whether a forked process keeps them. Kept here, because a reference that is collected together with its
object does not run its callback."""

_KEYS = count()


def make_calls(pending: Iterator[object]) -> None:
    """Makes the remaining calls of `pending`, a `map` of a C function. No interrupt can come between an argument and its call, so
    each call is made exactly once."""
    countOf(pending, None)  # runs the whole iterator in C


def when_gone(owner: object, pending: Iterator[object], *, forked: bool = True) -> None:
    """Runs `make_calls` when `owner` is collected. `forked`: also for its copy in a forked process."""
    key = next(_KEYS)
    # the argument of the callback is its reference: countOf(steps, reference)
    _WAITING[key] = ref(owner, MethodType(countOf, chain(pending, map(_WAITING.pop, (key,))))), forked


def _forget_parents() -> None:
    for key, (_, forked) in list(_WAITING.items()):
        if not forked:
            del _WAITING[key]


os.register_at_fork(after_in_child=_forget_parents)
