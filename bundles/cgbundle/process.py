"""What the runtime uses of its process: the open files of a bundle, cleanup when an object is collected, forks, and threads that
work during a load or calls. A load imports this before it starts a GPU's context, so it imports little itself."""

from __future__ import annotations

import _thread
import errno
import os
import stat
from itertools import chain, count
from operator import countOf
from types import MethodType
from weakref import ref

from .errors import BundleError, CallError, CgbundleError

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

# --- files: no links but those of the Hugging Face Hub's cache, no pipes, and no more bytes than the manifest says ---------

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


# --- forks ----------------------------------------------------------------------------------------------------------------
#
# A child has no OpenMP threads, which run CPU code, and no GPU context: calls would hang or fail.


class Forks:
    """State of this process. `number` counts the forks that led to it. `threads` and `gpu`: it has run CPU code, or has a GPU
    context. `lost_threads` and `lost_gpu`: a parent had."""

    __slots__ = ("gpu", "lost_gpu", "lost_threads", "number", "threads")

    def __init__(self) -> None:
        self.number = 0
        self.threads = self.gpu = self.lost_threads = self.lost_gpu = False

    def count(self) -> None:
        self.number += 1
        self.lost_threads, self.lost_gpu = self.lost_threads or self.threads, self.lost_gpu or self.gpu
        self.threads = self.gpu = False

    def check_threads(self) -> None:
        """Raises process-forked if CPU code would wait for threads of an ancestor."""
        if self.lost_threads:
            raise CallError(
                "process-forked", "this process was forked after its parent had run CPU code, whose threads do not exist here"
            )

    def check_gpu(self) -> None:
        if self.lost_gpu:
            raise CallError("process-forked", "this process was forked after its parent had used the GPU: CUDA does not work here")


FORKS = Forks()
os.register_at_fork(after_in_child=FORKS.count)


def forked(name: str) -> CallError:
    """The error for a program that was loaded before a fork."""
    return CallError("process-forked", f"program {name!r} was loaded before this process was forked, and works in the parent only")


# --- threads --------------------------------------------------------------------------------------------------------------
#
# Creating a GPU's context takes 0.2 s, as long as the rest of a load.  Graphs of further int_keys are built while a program already
# answers.


class ContextFuture:
    """The context that `make` returns, started at once; without `make` None. Uses `_thread`, because importing `threading` takes
    half as long as everything before it. `make` must not import: the first thread that imports `threading` becomes its main
    thread."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self._context: Any = None
        self._error: CgbundleError | None = None
        self._running = _thread.allocate_lock()
        if make is not None:
            self._running.acquire()
            _thread.start_new_thread(self._run, (make,))

    def take(self) -> Any:
        """The context, now the caller's; None without one. Raises what `make` raised."""
        self._join()
        if self._error is not None:
            raise self._error
        context, self._context = self._context, None
        return context

    def drop(self) -> None:
        """Releases the context unless it was taken."""
        self._join()
        if self._context is not None:
            self._context.release()
            self._context = None

    def _join(self) -> None:
        with self._running:  # the other thread holds it until it is done
            return

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self._context = make()
        except CgbundleError as error:
            self._error = error
        finally:
            self._running.release()


FIRST = 0.03
"""Seconds before the first step: the first call of a new process should not wait for a graph that is being built (17 ms for an 8B
model; tests/gpu/REPORT.md)."""

PAUSE = 1e-3  # seconds between steps, so that callers get the interpreter's lock

QUIET = 0.05
"""Seconds without a replay before a graph of an engine is built.  The engine's thread would wait for the interpreter's lock: with
one lane, vLLM made 5 to 17 % fewer tokens/s until all graphs were built (tests/gpu/REPORT.md)."""


class Background:
    """Runs the steps of an iterator in another thread. A step yields the seconds until the next. An error ends them: a call that
    needs the result will raise it again. `stop` and the end of the process wait for the running step, but start no other."""

    def __init__(self, steps: Iterator[float]) -> None:
        import threading  # few programs have so many graphs

        self._steps, self._stopped, self._main = steps, threading.Event(), threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="cgbundle-background")
        self._thread.start()

    def stop(self) -> None:
        """Returns when no step is running; may be called twice, and by a step."""
        self._stopped.set()
        if self._thread.ident != _thread.get_ident():
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._stopped.wait(FIRST):
                return
            for pause in self._steps:
                if self._stopped.wait(pause) or not self._main.is_alive():
                    return
        except CgbundleError:
            return
