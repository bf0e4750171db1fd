"""Reads of a file of weights by several threads at once, from the page cache or from the disk, whichever has them.

What is in the page cache is read with RWF_NOWAIT, which costs nothing more than a read and says where it ends.  From there on the
disk is told ahead what is wanted: eight threads that wait for what each of them asked for got 0.2 GB/s of a disk that gives 1.2.

A file that is larger than half of the machine's memory would push everything else out of the cache, and its beginning would be gone
at its end.  It is read with O_DIRECT, around the cache; where that cannot be, its pages are given back behind the reading.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress

from ..errors import BundleError
from ..format.file_names import WEIGHTS

ALIGNMENT = 4096
"""Bytes: of places and lengths of reads around the page cache, and of the memory that they go to."""

STEP = 512 << 10
"""Bytes that the disk is told of at a time; the system drops what is more than a device takes at once."""

SAMPLES = 64
"""Places of a large file that are looked at, to see whether it is in the page cache.  They are others every time: a look may bring
its page there."""


class WeightReader:
    """The open file `file`, the caller's, which errors call `name`.  `aligned`: whether `read` is given memory that begins at a
    page.

    `cold`: something was not in the page cache, and whoever reads on should `announce` what comes next.  Raises weights-invalid.
    """

    __slots__ = ("_around", "_direct", "_drop", "_file", "_name", "cold")

    def __init__(self, file: int, *, aligned: bool, name: str = WEIGHTS) -> None:
        self._name = name
        self._file, self._direct, self._drop, self.cold = file, -1, False, False
        self._around = False
        if 2 * os.fstat(file).st_size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") or is_cached(file):
            return
        with suppress(OSError):  # no /proc, or a file system without
            self._direct = _reopened(file, os.O_DIRECT) if aligned else -1
        self._around = self._direct >= 0
        self._drop = not self._around

    def read(self, view: memoryview, begin: int, size: int) -> int:
        """Reads `size` bytes at `begin` of the file into the view; where in it they begin.

        What lies around them, as far as the next multiples of ALIGNMENT, must have room in the view.  Raises weights-invalid where
        the file ends too early, OSError.
        """
        if self._around:
            lead = begin % ALIGNMENT
            length = -(-(lead + size) // ALIGNMENT) * ALIGNMENT
            try:
                self._fill(self._direct, view[:length], begin - lead, lead + size, 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._around, self._drop = False, True  # a file system that opens it so, and cannot read
            else:
                return lead
        done = 0 if self.cold else self._near(view[:size], begin)
        self._fill(self._file, view[:size], begin, size, done)
        if self._drop:
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_DONTNEED)
        return 0

    def announce(self, places: Iterable[tuple[int, int]]) -> None:
        """The disk begins to read these (begin, size)."""
        if not self._around:
            announce(self._file, places)

    def close(self) -> None:
        """Gives back what this opened; nobody reads any more.  May be called twice."""
        if self._direct >= 0:
            os.close(self._direct)
        self._direct = -1

    def _near(self, view: memoryview, begin: int) -> int:
        """Reads what the page cache has from `begin` on; the bytes that were."""
        done = 0
        with suppress(OSError):  # BlockingIOError: nothing; or a file system that cannot tell
            done = os.preadv(self._file, [view], begin, os.RWF_NOWAIT)
        self.cold = self.cold or done < len(view)
        return done

    def _fill(self, file: int, view: memoryview, begin: int, size: int, done: int) -> None:
        while done < size:
            step = os.preadv(file, [view[done:]], begin + done)
            if not step:
                raise BundleError("weights-invalid", f"{self._name}: the file ends too early")
            done += step


def announce(file: int, places: Iterable[tuple[int, int]]) -> None:
    """The disk begins to read these (begin, size) of a file into the page cache."""
    for begin, size in places:
        for at in range(begin, begin + size, STEP):
            os.posix_fadvise(file, at, min(STEP, begin + size - at), os.POSIX_FADV_WILLNEED)


def is_cached(file: int) -> bool:
    """Whether most of an open file is in the page cache; False where the system cannot tell."""
    try:
        other = _reopened(file, 0)
    except OSError:
        return False
    try:
        os.posix_fadvise(other, 0, 0, os.POSIX_FADV_RANDOM)  # looking must not read what lies around
        size, found, numbers = os.fstat(other).st_size, 0, os.urandom(8 * SAMPLES)
        for start in range(0, len(numbers), 8):
            with suppress(BlockingIOError):
                place = int.from_bytes(numbers[start : start + 8], "little") % size
                found += os.preadv(other, [bytearray(1)], place, os.RWF_NOWAIT)
        return 2 * found > SAMPLES
    except OSError:  # no RWF_NOWAIT
        return False
    finally:
        os.close(other)


def _reopened(file: int, flags: int) -> int:
    """Another descriptor of the same file, also when its path names another one by now."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC | flags)
