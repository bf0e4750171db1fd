"""The weights from the file into GPU memory, as fast as the bus takes them.

A copy from a mapped file is pageable: the driver's one thread moves it at 10.8 GB/s.  Pinned memory moves at 55 GB/s, but pinning
all of it costs more than it gains.  So a few threads read the file into small pinned buffers, each sent on while the next is read.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..errors import BundleError, CgbundleError
from ..format.archive import WEIGHTS, Archive
from ..format.safetensors import Entry
from ..format.schema import Weight
from ..format.spans import HOST_ONLY
from .driver import Context, Relaxed, check, cu
from .libcuda import EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING

THREADS = 4
BUFFERS = 2
"""Staging buffers of a thread: one is read into while the other is copied from."""

CHUNK = 2 << 20
"""Bytes of a staging buffer."""


class Piece(NamedTuple):
    """`size` bytes at `begin` of the file that belong at `target` of memory weights."""

    begin: int
    size: int
    target: int


def listed(bundle: Archive) -> list[Piece]:
    """What of the bundle's weights belongs on the GPU; the disk begins to read.  Raises weights-invalid."""
    manifest = bundle.manifest
    rows = [weight for weight in manifest.weights if weight.memory == "weights"]
    if not rows:
        return []
    os.posix_fadvise(bundle.descriptor(WEIGHTS), 0, 0, os.POSIX_FADV_WILLNEED)  # while the driver starts
    return pieces(rows, bundle.tensors(WEIGHTS), dict(manifest.memories).get("weights", 0))


def pieces(weights: Sequence[Weight], entries: Mapping[str, Entry], capacity: int) -> list[Piece]:
    """Where the bytes of the file go, in the file's order: tied weights once, what is adjacent in both places as one.  `capacity`:
    bytes of memory weights.  Raises weights-invalid where the file lacks a weight or the memory is too small."""
    found = set()
    for weight in weights:
        entry = entries.get(weight.tensor)
        if entry is None:
            raise BundleError(
                "weights-invalid", f"weights.safetensors: no tensor {weight.tensor!r}, which weight {weight.name!r} names"
            )
        if weight.offset == HOST_ONLY:
            continue
        size = entry.end - entry.begin
        if weight.offset + size > capacity:
            raise BundleError(
                "weights-invalid",
                f"weight {weight.name!r}: {size} bytes at {weight.offset} of memory weights, which has {capacity}",
            )
        if size:
            found.add(Piece(entry.begin, size, weight.offset))
    merged: list[Piece] = []
    for piece in sorted(found):
        last = merged[-1] if merged else Piece(-1, 0, -1)
        if last.begin + last.size == piece.begin and last.target + last.size == piece.target:
            merged[-1] = Piece(last.begin, last.size + piece.size, last.target)
        else:
            merged.append(piece)
    return merged


def chunks(listed: Sequence[Piece], size: int) -> list[list[Piece]]:
    """The pieces cut and grouped so that each group lies within `size` successive bytes of the file."""
    groups: list[list[Piece]] = []
    limit = -1
    for piece in listed:
        done = 0
        while done < piece.size:
            begin = piece.begin + done
            if begin >= limit:
                groups.append([])
                limit = begin + size
            step = min(piece.size - done, limit - begin)
            groups[-1].append(Piece(begin, step, piece.target + done))
            done += step
    return groups


class Upload:
    """Weights on their way, by threads that start at once, each with its own stream and pinned buffers.

    `file`: an open descriptor, the caller's.

    `wait` raises the first failure (OutOfMemory, driver-failed, weights-invalid); `wait` or `stop` before memory weights is freed.
    """

    def __init__(
        self, context: Context, file: int, listed: Sequence[Piece], base: int, threads: int = THREADS, chunk: int = CHUNK
    ) -> None:
        self._context, self._file, self._base, self._chunk = context, file, base, chunk
        self._work = chunks(listed, chunk)
        self._work.reverse()  # pop takes the first
        self._total = len(self._work)
        self._sent: list[None] = []  # one item per group that arrived: appending is atomic
        self._failure: CgbundleError | OSError | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(min(threads, len(self._work)))]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Returns when every byte is in its place; may be called again."""
        for thread in self._threads:
            thread.join()
        if isinstance(self._failure, OSError):
            raise BundleError("weights-invalid", f"weights.safetensors: {self._failure.strerror}")
        if self._failure is not None:
            raise self._failure
        if len(self._sent) != self._total:  # a thread died of what nobody foresaw and printed it
            raise BundleError("weights-invalid", f"weights.safetensors: {len(self._sent)} of {self._total} pieces were copied")

    def stop(self) -> None:
        """Drops what has not been started and waits for the rest; never raises."""
        self._work.clear()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            with self._context, Relaxed(), ExitStack() as cleanup:
                self._copy(cleanup)
        except (CgbundleError, OSError) as failure:  # for whoever waits
            self._failure = failure
            self._work.clear()

    def _copy(self, cleanup: ExitStack) -> None:
        stream = check("cuStreamCreate", cu.cuStreamCreate(STREAM_NON_BLOCKING))
        cleanup.callback(cu.cuStreamDestroy, stream)
        address = int(check("cuMemHostAlloc", cu.cuMemHostAlloc(BUFFERS * self._chunk, 0), "staging"))
        cleanup.callback(cu.cuMemFreeHost, address)
        cleanup.callback(cu.cuStreamSynchronize, stream)  # before the buffer goes, also when a read failed
        view = memoryview((ctypes.c_char * (BUFFERS * self._chunk)).from_address(address)).cast("B")
        events = []
        for _ in range(BUFFERS):
            events.append(check("cuEventCreate", cu.cuEventCreate(EVENT_DISABLE_TIMING)))
            cleanup.callback(cu.cuEventDestroy, events[-1])
        done = 0
        while True:
            try:
                group = self._work.pop()
            except IndexError:
                break
            slot = done % BUFFERS
            check("cuEventSynchronize", cu.cuEventSynchronize(events[slot]))  # at once for an event never recorded
            self._send(group, view[slot * self._chunk : (slot + 1) * self._chunk], address + slot * self._chunk, stream)
            check("cuEventRecord", cu.cuEventRecord(events[slot], stream))
            done += 1
            self._sent.append(None)
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream), "weights")

    def _send(self, group: list[Piece], view: memoryview, address: int, stream: Any) -> None:
        first = group[0].begin
        length = group[-1].begin + group[-1].size - first
        done = 0
        while done < length:
            step = os.preadv(self._file, [view[done:length]], first + done)
            if not step:
                raise BundleError("weights-invalid", "weights.safetensors: the file ends too early")
            done += step
        for piece in group:
            place = address + piece.begin - first
            check("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(self._base + piece.target, place, piece.size, stream), "weights")
