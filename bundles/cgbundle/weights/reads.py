"""Reads of a file of weights by several threads, from the page cache or from the disk.

What is in the page cache is read with RWF_NOWAIT, which costs no more than a read and says where the cached part ends.  From there
on readahead is requested: eight threads that waited for their own reads got 0.2 GB/s of a disk that gives 1.2.

A file larger than half of the machine's memory would push everything else out of the cache, and its beginning would be gone at its
end.  It is read with O_DIRECT; where the file system has none, its pages are dropped behind the reading.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import BundleError
from ..format.file_names import WEIGHTS

ALIGNMENT = 4096
"""Bytes: offsets, lengths and memory of direct reads are multiples of this."""

STEP = 512 << 10
"""Bytes of a request for readahead; the system drops what is more than a device takes at once."""

SAMPLES = 64
"""Places of a large file that are tried for the page cache, drawn anew each time: a try may bring its page there."""


class Piece(NamedTuple):
    """`size` bytes at `begin` of a file that belong at `target` of memory weights."""

    begin: int
    size: int
    target: int


def place(group: Sequence[Piece]) -> tuple[int, int]:
    """Where a group begins in the file, and its bytes from the first to the last."""
    return group[0].begin, group[-1].begin + group[-1].size - group[0].begin


class WeightReader:
    """Reads the open file `file`, the caller's, which errors call `name`.  `aligned`: `read` is given memory that begins at a page.

    `cold`: something was not in the page cache; call `announce` ahead of further reads.  Raises weights-invalid.
    """

    __slots__ = ("_direct", "_drop", "_file", "_name", "cold")

    def __init__(self, file: int, *, aligned: bool, name: str = WEIGHTS) -> None:
        self._file, self._name, self.cold = file, name, False
        self._direct, self._drop = -1, False  # a second descriptor; whether to drop pages behind the reading
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 2 * os.fstat(file).st_size <= memory or is_cached(file):
            return
        self._drop = True
        with suppress(OSError):  # no /proc, or a file system without O_DIRECT
            if aligned:
                self._direct, self._drop = _reopened(file, os.O_DIRECT), False

    def read(self, view: memoryview, begin: int, size: int) -> int:
        """Reads `size` bytes at `begin` of the file into the view; returns where in the view they begin.

        The view has room as far as the multiples of ALIGNMENT around them.  Raises weights-invalid where the file ends too early,
        OSError.
        """
        if self._direct >= 0 and not self._drop:
            lead = begin % ALIGNMENT
            length = -(-(lead + size) // ALIGNMENT) * ALIGNMENT
            try:
                self._fill(self._direct, view[:length], begin - lead, lead + size, 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._drop = True  # a file system that opens the file so, and cannot read it
            else:
                return lead
        done = 0
        if not self.cold:
            with suppress(OSError):  # BlockingIOError: nothing is cached; or a file system that cannot tell
                done = os.preadv(self._file, [view[:size]], begin, os.RWF_NOWAIT)
            self.cold = done < size
        self._fill(self._file, view[:size], begin, size, done)
        if self._drop:
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_DONTNEED)
        return 0

    def announce(self, places: Iterable[tuple[int, int]]) -> None:
        """Requests readahead of these (begin, size)."""
        if self._direct < 0 or self._drop:
            announce(self._file, places)

    def close(self) -> None:
        """Closes what this opened; nobody reads any more.  May be called twice."""
        if self._direct >= 0:
            os.close(self._direct)
        self._direct = -1

    def _fill(self, file: int, view: memoryview, begin: int, size: int, done: int) -> None:
        while done < size:
            step = os.preadv(file, [view[done:]], begin + done)
            if not step:
                raise BundleError("weights-invalid", f"{self._name}: the file ends too early")
            done += step


def announce(file: int, places: Iterable[tuple[int, int]]) -> None:
    """Requests readahead of these (begin, size) of a file (posix_fadvise)."""
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
        os.posix_fadvise(other, 0, 0, os.POSIX_FADV_RANDOM)  # a try must not read what lies around it
        size, cached, numbers = os.fstat(other).st_size, 0, os.urandom(8 * SAMPLES)
        for start in range(0, len(numbers), 8):
            with suppress(BlockingIOError):
                place = int.from_bytes(numbers[start : start + 8], "little") % size
                cached += os.preadv(other, [bytearray(1)], place, os.RWF_NOWAIT)
        return 2 * cached > SAMPLES
    except OSError:  # no RWF_NOWAIT
        return False
    finally:
        os.close(other)


def _reopened(file: int, flags: int) -> int:
    """Another descriptor of the same file, also where its path names another file by now."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC | flags)
