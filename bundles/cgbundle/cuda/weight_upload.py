"""The weights from the file into GPU memory, as fast as the bus takes them.

A copy from a mapped file is pageable: the driver's one thread moves it at 10.8 GB/s.  Pinned memory moves at 55 GB/s, but pinning
costs 0.5 ms a megabyte, more than it gains for all of a file.  So a few threads read the file into pieces of a small pinned region,
in huge pages, and one thread sends them on and gives them back: 33 to 47 GB/s by host, where threads that each read and send get
less, since they wait for the interpreter's lock.  Of much that is in the page cache the C library's threads read more
(weight_lanes.py; tests/gpu/REPORT.md).  What is small goes as it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple

from ..errors import BundleError, CgbundleError
from ..format.file_names import WEIGHTS
from ..session.async_reads import AsyncReads, available
from ..session.weight_reads import WeightReader, is_cached
from .driver import Context, Relaxed, check, cu
from .weight_lanes import send_by_lanes
from .weight_pieces import Piece, chunks, place
from .weight_slots import Slot, new_slot, pin, staging

CHUNK = 2 << 20
"""Bytes that are read at a time, into a slot."""

AHEAD = 64 << 20
"""Bytes of what is not in the page cache that the disk begins to read before they are read."""


class Way(NamedTuple):
    """How weights travel: so many threads read them into slots of `chunk` bytes, of pinned memory or, one after the other, not.
    `lanes`: by as many of the C library's instead, where it has them and the page cache has the file."""

    readers: int
    slots: int
    pinned: bool
    chunk: int = CHUNK
    lanes: int = 0


SMALL, LARGE = 16 << 20, 1 << 30


def way(size: int) -> Way:
    """How `size` bytes travel (measured: tests/gpu/REPORT.md)."""
    if size <= SMALL:
        return Way(readers=1, slots=1, pinned=False)
    if size < LARGE:
        return Way(readers=4, slots=8, pinned=True)
    return Way(readers=8, slots=16, pinned=True, chunk=2 * CHUNK, lanes=12)


Full = tuple[Slot, list[Piece], int]
"""A slot that holds a group, and where in it the group begins."""


class Upload:
    """Weights on their way, by threads that start at once.

    `file`: an open descriptor, the caller's, of the file that errors call `name`.  `how`: by default as the size asks for.

    `wait` raises the first failure (OutOfMemory, driver-failed, weights-invalid); `wait` or `stop` before memory weights is freed.
    """

    def __init__(
        self, context: Context, file: int, listed: Sequence[Piece], base: int, how: Way | None = None, name: str = WEIGHTS
    ) -> None:
        self._context, self._base, self._name = context, base, name
        self._way = how or way(sum(piece.size for piece in listed))
        if self._way.lanes and not (available() and is_cached(file)):
            self._way = self._way._replace(lanes=0)
        self._groups = chunks(listed, self._way.chunk)
        self._total, self._sent, self._next, self._announced = len(self._groups), 0, count(), 0
        self._ahead = -(-AHEAD // self._way.chunk)
        self._free: SimpleQueue[Slot | None] = SimpleQueue()  # None ends who takes it
        self._full: SimpleQueue[Full | None] = SimpleQueue()
        self._failure: CgbundleError | OSError | None = None
        self._thread: threading.Thread | None = None
        if listed:
            self._file, self._reader = file, WeightReader(file, aligned=self._way.pinned, name=name)
            self._thread = threading.Thread(target=self._run, name="cgbundle-upload", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Returns when every byte is in its place; may be called again."""
        self._join()
        if isinstance(self._failure, OSError):
            raise BundleError("weights-invalid", f"{self._name}: {self._failure.strerror}")
        if self._failure is not None:
            raise self._failure
        if self._sent != self._total:  # a thread died of what nobody foresaw and printed it
            raise BundleError("weights-invalid", f"{self._name}: {self._sent} of {self._total} pieces were copied")

    def stop(self) -> None:
        """Drops what has not been started and waits for the rest; never raises."""
        self._groups = []
        self._full.put(None)
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._reader.close()

    def _run(self) -> None:
        try:
            with self._context, Relaxed(), ExitStack() as cleanup:
                if self._way.lanes:
                    self._send_by_lanes(cleanup)
                elif self._way.pinned:
                    self._start_readers(self._staged(cleanup), cleanup)
                    self._send_all()
                else:
                    self._copy(self._staged(cleanup)[0])
        except (CgbundleError, OSError) as failure:  # for whoever waits
            self._failure = self._failure or failure

    def _send_by_lanes(self, cleanup: ExitStack) -> None:
        send = cu.held("cuMemcpyHtoDAsync")
        reads = AsyncReads(self._file, min(self._way.lanes, self._total), self._name)
        groups = self._groups
        for _ in send_by_lanes(reads, groups, self._way.chunk, lambda slot, group: self._send(send, slot, group, 0), cleanup):
            self._sent += 1
            if self._groups is not groups:  # stopped
                return

    def _staged(self, cleanup: ExitStack) -> list[Slot]:
        """The slots, of which there is a stream each; `cleanup` gives them back when nothing is on its way."""
        size, number = self._way.chunk, min(self._way.slots, self._total)
        memory = staging(size * number, cleanup, pages=self._way.pinned)
        if self._way.pinned:
            pin(memory, cleanup)
        return [new_slot(memory[at : at + size], cleanup) for at in range(0, size * number, size)]

    def _start_readers(self, slots: Sequence[Slot], cleanup: ExitStack) -> None:
        """The threads that read, which `cleanup` ends and waits for."""
        readers = [threading.Thread(target=self._read, daemon=True) for _ in range(min(self._way.readers, len(slots)))]
        for slot in slots:
            self._free.put(slot)
        for thread in readers:
            thread.start()
            cleanup.callback(thread.join)
        cleanup.callback(self._end_readers, len(readers))

    def _end_readers(self, number: int) -> None:
        self._groups = []
        for _ in range(number):
            self._free.put(None)

    def _read(self) -> None:
        ended = False
        try:
            while (slot := self._free.get()) is not None:
                index = next(self._next)  # each thread another one: `next` is atomic
                if index >= len(groups := self._groups):
                    break
                self._full.put((slot, groups[index], self._fill(slot, index, groups[index])))
            ended = True
        except (CgbundleError, OSError) as failure:
            self._failure = failure
        finally:
            if not ended:
                self._full.put(None)

    def _send_all(self) -> None:
        """Sends on what the readers have read.  Keeps the interpreter's lock where the driver returns at once: every time it is let
        go, a reader has it, and it has to be waited for."""
        send, query = cu.held("cuMemcpyHtoDAsync"), cu.held("cuStreamQuery")
        travelling: deque[Slot] = deque()
        for _ in range(self._total):
            while travelling and not query(travelling[0].stream):
                self._free.put(travelling.popleft())
            while travelling and self._full.empty():
                check("cuStreamSynchronize", cu.cuStreamSynchronize(travelling[0].stream), "weights")
                self._free.put(travelling.popleft())
            full = self._full.get()
            if full is None:
                return
            self._send(send, *full)
            travelling.append(full[0])
            self._sent += 1
        for slot in travelling:
            check("cuStreamSynchronize", cu.cuStreamSynchronize(slot.stream), "weights")

    def _copy(self, slot: Slot) -> None:
        """Reads and sends one group after the other."""
        for index, group in enumerate(self._groups):
            self._send(cu.cuMemcpyHtoDAsync, slot, group, self._fill(slot, index, group))
            check("cuStreamSynchronize", cu.cuStreamSynchronize(slot.stream), "weights")
            self._sent += 1

    def _fill(self, slot: Slot, index: int, group: Sequence[Piece]) -> int:
        """Reads a group; where in the slot it begins."""
        if self._reader.cold:
            self._announce(index)
        return self._reader.read(slot.view, *place(group))

    def _send(self, send: Callable[[int, int, int, Any], int], slot: Slot, group: Sequence[Piece], lead: int) -> None:
        first = group[0].begin
        for piece in group:
            error = send(self._base + piece.target, slot.address + lead + piece.begin - first, piece.size, slot.stream)
            if error:
                check("cuMemcpyHtoDAsync", error, "weights")

    def _announce(self, index: int) -> None:
        """Tells the disk what comes after group `index`.  Two threads at once may tell it the same twice."""
        begin, self._announced = max(self._announced, index), index + self._ahead
        self._reader.announce([place(group) for group in self._groups[begin : index + self._ahead]])
