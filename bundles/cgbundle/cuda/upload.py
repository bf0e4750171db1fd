"""Uploads weights from files into GPU memory at 33 to 47 GB/s, depending on the host. The driver copies a mapped file with one
thread at 10.8 GB/s. Pinned memory is copied at 55 GB/s, but pinning takes 0.5 ms/MB. So threads read the file into slots of a small
pinned region of huge pages, and one thread sends them; threads that read and send would wait for the interpreter's lock. Large
files in the page cache are read by the C library's threads (lanes.py; tests/gpu/REPORT.md), small ones without threads."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple

from ..errors import BundleError, CgbundleError
from ..format.archive import Archive
from ..format.file_names import WEIGHTS, weight_files
from ..format.safetensors import Entry
from ..format.schema import Weight
from .driver import Context, Relaxed, call, check, cu
from .memory import Piece, Slot, new_slot, pin, place, staging

FIRST = 256 << 20  # bytes of readahead while the driver starts
CHUNK = 2 << 20  # bytes of a read, and of a slot
AHEAD = 64 << 20  # bytes of readahead for uncached files
SMALL, LARGE = 16 << 20, 1 << 30  # bytes: up to SMALL without threads, from LARGE by lanes


def listed(bundle: Archive) -> dict[str, list[Piece]]:
    """For each file, the pieces that belong on the GPU; requests readahead. Raises weights-invalid."""
    capacity, files = dict(bundle.manifest.memories).get("weights", 0), {}
    for file, weights in weight_files(bundle.manifest).items():
        rows = [weight for weight in weights if weight.memory == "weights"]
        parts = pieces(rows, bundle.tensors(file), capacity, file) if rows else []
        if parts:
            files[file] = parts
            budget = FIRST
            for piece in parts:
                announce(bundle.descriptor(file), [(piece.begin, min(piece.size, budget))])
                budget -= min(piece.size, budget)
    return files


def pieces(weights: Sequence[Weight], entries: Mapping[str, Entry], capacity: int, file: str = WEIGHTS) -> list[Piece]:
    """Where the bytes of a file go, in file order: tied weights once, adjacent ones merged. `capacity`: bytes of memory weights.
    Raises weights-invalid."""
    places = set()
    for weight in weights:
        entry = entries.get(weight.tensor)
        if entry is None:
            raise BundleError("weights-invalid", f"{file}: no tensor {weight.tensor!r}, which weight {weight.name!r} names")
        size = entry.end - entry.begin
        if not size:
            continue
        if weight.offset + size > capacity:
            text = f"weight {weight.name!r}: {size} bytes at {weight.offset} of memory weights, which has {capacity}"
            raise BundleError("weights-invalid", text)
        places.add(Piece(entry.begin, size, weight.offset))
    merged: list[Piece] = []
    for piece in sorted(places):
        last = merged[-1] if merged else Piece(-1, 0, -1)
        if last.begin + last.size == piece.begin and last.target + last.size == piece.target:
            merged[-1] = Piece(last.begin, last.size + piece.size, last.target)
        else:
            merged.append(piece)
    return merged


def chunks(parts: Sequence[Piece], size: int) -> list[list[Piece]]:
    """The pieces, split and grouped by aligned ranges of `size` bytes of the file."""
    groups: list[list[Piece]] = []
    limit = -1
    for piece in parts:
        done = 0
        while done < piece.size:
            begin = piece.begin + done
            if begin >= limit:
                groups.append([])
                limit = begin - begin % size + size
            step = min(piece.size - done, limit - begin)
            groups[-1].append(Piece(begin, step, piece.target + done))
            done += step
    return groups


class Way(NamedTuple):
    """Transfer settings: threads that read, slots of `chunk` bytes, pinned or not; `lanes` of the C library if the file is in the
    page cache."""

    readers: int
    slots: int
    pinned: bool
    chunk: int = CHUNK
    lanes: int = 0


def way(size: int) -> Way:
    """Settings for `size` bytes (measured: tests/gpu/REPORT.md)."""
    if size <= SMALL:
        return Way(readers=1, slots=1, pinned=False)
    if size < LARGE:
        return Way(readers=4, slots=8, pinned=True)
    return Way(readers=8, slots=16, pinned=True, chunk=2 * CHUNK, lanes=12)


class Upload:
    """An upload by threads that start at once. `file`: an open descriptor of the caller, `name` for errors. Call `wait` or `stop`
    before memory weights is freed. Raises (in `wait`) OutOfMemory, driver-failed, weights-invalid."""

    def __init__(
        self, context: Context, file: int, parts: Sequence[Piece], base: int, how: Way | None = None, name: str = WEIGHTS
    ) -> None:
        self._context, self._file, self._base, self._name = context, file, base, name
        self._way = how or way(sum(piece.size for piece in parts))
        if self._way.lanes:
            from ..cuda import lanes  # few bundles are so large

            if not (lanes.available() and is_cached(file)):
                self._way = self._way._replace(lanes=0)
        self._groups = chunks(parts, self._way.chunk)
        self._total, self._sent, self._announced = len(self._groups), 0, 0
        self._full: SimpleQueue[tuple[Slot, list[Piece], int] | None] = SimpleQueue()  # slot, group, the group's start in the slot
        self._failure: CgbundleError | OSError | None = None
        self._thread: threading.Thread | None = None
        if parts:
            self._reader = WeightReader(file, aligned=self._way.pinned, name=name)
            self._thread = threading.Thread(target=self._run, name="cgbundle-upload", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Returns when all is copied; may be called again."""
        self._join()
        if isinstance(self._failure, OSError):
            raise BundleError("weights-invalid", f"{self._name}: {self._failure.strerror}")
        if self._failure is not None:
            raise self._failure
        if self._sent != self._total:  # a thread ended by an unexpected exception, and printed it
            raise BundleError("weights-invalid", f"{self._name}: {self._sent} of {self._total} pieces were copied")

    def stop(self) -> None:
        """Drops unread pieces and waits for the rest; never raises."""
        self._groups = []
        self._full.put(None)
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._reader.close()

    def _run(self) -> None:
        size, number, pinned = self._way.chunk, min(self._way.slots, self._total), self._way.pinned
        try:
            with self._context, Relaxed(), ExitStack() as cleanup:
                if self._way.lanes:
                    self._send_by_lanes(cleanup)
                    return
                memory = staging(size * number, cleanup, pages=pinned)
                if pinned:
                    pin(memory, cleanup)
                slots = [new_slot(memory[at : at + size], cleanup) for at in range(0, size * number, size)]
                if pinned:
                    self._send_by_readers(slots, cleanup)
                for index, group in enumerate(self._groups if not pinned else ()):  # without reader threads
                    self._send(cu.cuMemcpyHtoDAsync, slots[0], group, self._fill(slots[0], index, group))
                    call("cuStreamSynchronize", slots[0].stream, detail="weights")
                    self._sent += 1
        except (CgbundleError, OSError) as failure:  # `wait` raises it
            self._failure = self._failure or failure

    def _send_by_lanes(self, cleanup: ExitStack) -> None:
        from .lanes import AsyncReads, send_by_lanes

        send, groups = cu.held("cuMemcpyHtoDAsync"), self._groups
        reads = AsyncReads(self._file, min(self._way.lanes, self._total), self._name)
        for _ in send_by_lanes(reads, groups, self._way.chunk, lambda slot, group: self._send(send, slot, group, 0), cleanup):
            self._sent += 1
            if self._groups is not groups:  # stopped
                return

    def _send_by_readers(self, slots: Sequence[Slot], cleanup: ExitStack) -> None:
        """Threads read into free slots, this one sends them; `cleanup` ends the threads. This thread keeps the interpreter's lock
        during driver calls that return at once: otherwise a reader takes it, and this thread waits."""
        free: SimpleQueue[Slot | None] = SimpleQueue()  # None ends a reader
        numbers = count()

        def read() -> None:
            ended = False
            try:
                while (slot := free.get()) is not None:
                    index = next(numbers)  # a different one in each thread: `next` is atomic
                    if index >= len(groups := self._groups):
                        break
                    self._full.put((slot, groups[index], self._fill(slot, index, groups[index])))
                ended = True
            except (CgbundleError, OSError) as failure:
                self._failure = failure
            finally:
                if not ended:
                    self._full.put(None)

        def end() -> None:
            self._groups = []
            for _ in readers:
                free.put(None)

        readers = [threading.Thread(target=read, daemon=True) for _ in range(min(self._way.readers, len(slots)))]
        for slot in slots:
            free.put(slot)
        for thread in readers:
            thread.start()
            cleanup.callback(thread.join)
        cleanup.callback(end)
        send, query = cu.held("cuMemcpyHtoDAsync"), cu.held("cuStreamQuery")
        sending: deque[Slot] = deque()
        for _ in range(self._total):
            while sending and not query(sending[0].stream):
                free.put(sending.popleft())
            while sending and self._full.empty():
                call("cuStreamSynchronize", sending[0].stream, detail="weights")
                free.put(sending.popleft())
            full = self._full.get()
            if full is None:
                return
            self._send(send, *full)
            sending.append(full[0])
            self._sent += 1
        for slot in sending:
            call("cuStreamSynchronize", slot.stream, detail="weights")

    def _fill(self, slot: Slot, index: int, group: Sequence[Piece]) -> int:
        """Reads a group, and requests readahead of later ones; returns its start in the slot."""
        if self._reader.cold:
            ahead = -(-AHEAD // self._way.chunk)
            begin, self._announced = max(self._announced, index), index + ahead  # two threads may request the same
            self._reader.announce([place(later) for later in self._groups[begin : index + ahead]])
        return self._reader.read(slot.view, *place(group))

    def _send(self, send: Callable[[int, int, int, Any], int], slot: Slot, group: Sequence[Piece], lead: int) -> None:
        first = group[0].begin
        for piece in group:
            error = send(self._base + piece.target, slot.address + lead + piece.begin - first, piece.size, slot.stream)
            if error:
                check("cuMemcpyHtoDAsync", error, "weights")


# --- reads from the page cache or the disk ------------------------------------------------------------------------------
#
# The cached part of a file is read with RWF_NOWAIT.  For the rest readahead is requested: eight threads without it got 0.2 GB/s
# from a disk that has 1.2.  A file above half of the machine's memory would evict everything else from the cache: it is read with
# O_DIRECT, or its pages are dropped.

ALIGNMENT = 4096  # bytes: unit of offsets, lengths and addresses of direct reads
STEP = 512 << 10  # bytes of a request for readahead; the system drops more than a device takes at once
SAMPLES = 64  # random positions at which a large file is tested for the page cache; a test may load the page


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
