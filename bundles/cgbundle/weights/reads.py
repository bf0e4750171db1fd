"""Reads a file of weights by several threads, from the page cache or from the disk. The cached part is read with RWF_NOWAIT. For
the rest readahead is requested: eight threads without it got 0.2 GB/s from a disk that has 1.2. A file above half of the machine's
memory would evict everything else from the cache: it is read with O_DIRECT, or its pages are dropped."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import BundleError
from ..format.file_names import WEIGHTS

ALIGNMENT = 4096  # bytes: unit of offsets, lengths and addresses of direct reads
STEP = 512 << 10  # bytes of a request for readahead; the system drops more than a device takes at once
SAMPLES = 64  # random positions at which a large file is tested for the page cache; a test may load the page


class Piece(NamedTuple):
    """`size` bytes at `begin` of a file, for `target` of memory weights."""

    begin: int
    size: int
    target: int


def place(group: Sequence[Piece]) -> tuple[int, int]:
    """A group's offset in the file, and its bytes from first to last."""
    return group[0].begin, group[-1].begin + group[-1].size - group[0].begin


class WeightReader:
    """Reads an open file (`name` for errors) into memory that starts at a page if `aligned`. `cold`: something was not in the page
    cache; call `announce` before further reads. Raises weights-invalid."""

    __slots__ = ("_direct", "_drop", "_file", "_name", "cold")

    def __init__(self, file: int, *, aligned: bool, name: str = WEIGHTS) -> None:
        self._file, self._name, self.cold = file, name, False
        self._direct, self._drop = -1, False  # a descriptor for direct reads; whether to drop pages after reads
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 2 * os.fstat(file).st_size <= memory or is_cached(file):
            return
        self._drop = True
        with suppress(OSError):  # no /proc, or a file system without O_DIRECT
            if aligned:
                self._direct, self._drop = _reopened(file, os.O_DIRECT), False

    def read(self, view: memoryview, begin: int, size: int) -> int:
        """Reads `size` bytes at `begin` into the view, which has room for the aligned range; returns their start in the view.
        Raises weights-invalid at the end of the file, OSError."""
        if self._direct >= 0 and not self._drop:
            lead = begin % ALIGNMENT
            length = -(-(lead + size) // ALIGNMENT) * ALIGNMENT
            try:
                self._fill(self._direct, view[:length], begin - lead, lead + size, 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._drop = True  # a file system that allows O_DIRECT at open, but not at reads
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
        if self._direct < 0 or self._drop:
            announce(self._file, places)

    def close(self) -> None:
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
    """Requests readahead of (begin, size) ranges (posix_fadvise)."""
    for begin, size in places:
        for at in range(begin, begin + size, STEP):
            os.posix_fadvise(file, at, min(STEP, begin + size - at), os.POSIX_FADV_WILLNEED)


def is_cached(file: int) -> bool:
    """Whether most of a file is in the page cache; False if unknown."""
    try:
        other = _reopened(file, 0)
    except OSError:
        return False
    try:
        os.posix_fadvise(other, 0, 0, os.POSIX_FADV_RANDOM)  # a test must not start readahead
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
    """Another descriptor of the same file, even if its path names another by now."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC | flags)
