"""The weights from the file into GPU memory, as fast as the bus takes them.

A copy from a mapped file is pageable: the driver's one thread moves it at 10.8 GB/s.  Pinned memory moves at 55 GB/s, but pinning
costs 0.5 ms a megabyte, more than it gains for all of a file.  So a few threads read the file into small pinned buffers, each sent
on while the next is read; what is small goes as it is.

New contents for a loaded program are brought near before any of them is put in its place: to the GPU, where it has room.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BundleError, CallError, CgbundleError, OutOfMemory
from ..format.archive import WEIGHTS, Archive
from ..format.safetensors import Entry
from ..format.schema import Weight
from ..format.spans import HOST_ONLY
from ..session.weight_reads import WeightReader, announce
from . import memory
from .driver import Context, Relaxed, check, cu
from .libcuda import STREAM_NON_BLOCKING

if TYPE_CHECKING:
    from ..session.weight_contents import Contents, OpenFile

ALIGNMENT = 256
"""Of a weight, in bytes: as in memory weights."""

CHUNK = 2 << 20
"""Bytes that are read at a time, into a buffer.  Larger ones leave the processor's cache before they are sent."""

FIRST, AHEAD = 256 << 20, 64 << 20
"""Bytes that the disk begins to read while the driver starts, and of those that are not in the page cache, before they are read."""


class Way(NamedTuple):
    """How weights travel: by so many threads, each with its own buffers of `chunk` bytes, of pinned memory or not."""

    threads: int
    buffers: int
    pinned: bool
    chunk: int = CHUNK


SMALL, LARGE = 16 << 20, 1 << 30


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
    found = pieces(rows, bundle.tensors(WEIGHTS), dict(manifest.memories).get("weights", 0))
    places, left = [], FIRST
    for piece in found:
        places.append((piece.begin, min(piece.size, left)))
        left -= places[-1][1]
    announce(bundle.descriptor(WEIGHTS), places)
    return found


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
    """The pieces cut and grouped so that each group lies within `size` bytes of the file, from a multiple of `size` on."""
    groups: list[list[Piece]] = []
    limit = -1
    for piece in listed:
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


def place(group: Sequence[Piece]) -> tuple[int, int]:
    """Where a group begins in the file, and its bytes from the first to the last."""
    return group[0].begin, group[-1].begin + group[-1].size - group[0].begin


def way(size: int) -> Way:
    """How `size` bytes travel.  Threads of Python wait for the interpreter's lock between two buffers: larger ones, which a program
    in C is slower with, bring 36 GB/s where those of 2 MB bring 31 (tests/gpu/REPORT.md)."""
    if size <= SMALL:
        return Way(threads=1, buffers=1, pinned=False)
    if size < LARGE:
        return Way(threads=4, buffers=2, pinned=True)
    return Way(threads=8, buffers=2, pinned=True, chunk=2 * CHUNK)


class Buffer(NamedTuple):
    """A buffer, its address, and the stream that alone reads it: to wait for the stream is to wait for the buffer."""

    view: memoryview
    address: int
    stream: Any


class Upload:
    """Weights on their way, by threads that start at once, each with its own streams and buffers.

    `file`: an open descriptor, the caller's.  `way`: how, by default as the size asks for.

    `wait` raises the first failure (OutOfMemory, driver-failed, weights-invalid); `wait` or `stop` before memory weights is freed.
    """

    def __init__(self, context: Context, file: int, listed: Sequence[Piece], base: int, how: Way | None = None) -> None:
        self._context, self._base = context, base
        self._way = how or way(sum(piece.size for piece in listed))
        self._groups = chunks(listed, self._way.chunk)
        self._total, self._next, self._announced = len(self._groups), count(), 0
        self._ahead = -(-AHEAD // self._way.chunk)
        self._reader = WeightReader(file, aligned=self._way.pinned) if listed else None
        self._sent: list[None] = []  # one item per group that arrived: appending is atomic
        self._failure: CgbundleError | OSError | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(min(self._way.threads, self._total))]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Returns when every byte is in its place; may be called again."""
        for thread in self._threads:
            thread.join()
        self._close()
        if isinstance(self._failure, OSError):
            raise BundleError("weights-invalid", f"weights.safetensors: {self._failure.strerror}")
        if self._failure is not None:
            raise self._failure
        if len(self._sent) != self._total:  # a thread died of what nobody foresaw and printed it
            raise BundleError("weights-invalid", f"weights.safetensors: {len(self._sent)} of {self._total} pieces were copied")

    def stop(self) -> None:
        """Drops what has not been started and waits for the rest; never raises."""
        self._groups = []
        for thread in self._threads:
            thread.join()
        self._close()

    def _run(self) -> None:
        try:
            with self._context, Relaxed(), ExitStack() as cleanup:
                self._copy(cleanup)
        except (CgbundleError, OSError) as failure:  # for whoever waits
            self._failure = failure
            self._groups = []

    def _copy(self, cleanup: ExitStack) -> None:
        sent, buffers = self._sent, self._way.buffers
        made: list[Buffer] = []
        for number in count():
            index = next(self._next)  # each thread another one: `next` is atomic
            try:
                group = self._groups[index]
            except IndexError:
                break
            if number < buffers:  # while the first one travels: pinning takes as long as reading
                made.append(self._buffer(cleanup))
            view, address, stream = made[number % buffers]
            if number >= buffers:
                check("cuStreamSynchronize", cu.cuStreamSynchronize(stream), "weights")
            self._send(index, group, view, address, stream)
            sent.append(None)
        for buffer in made:
            check("cuStreamSynchronize", cu.cuStreamSynchronize(buffer.stream), "weights")

    def _buffer(self, cleanup: ExitStack) -> Buffer:
        size = self._way.chunk
        if self._way.pinned:
            address = int(check("cuMemHostAlloc", cu.cuMemHostAlloc(size, 0), "staging"))
            cleanup.callback(cu.cuMemFreeHost, address)
            memory = (ctypes.c_char * size).from_address(address)
        else:
            memory = (ctypes.c_char * size)()
            address = ctypes.addressof(memory)
        stream = check("cuStreamCreate", cu.cuStreamCreate(STREAM_NON_BLOCKING))
        cleanup.callback(cu.cuStreamDestroy, stream)
        cleanup.callback(cu.cuStreamSynchronize, stream)  # before the buffer goes, also when a read failed
        return Buffer(memoryview(memory).cast("B"), address, stream)

    def _send(self, index: int, group: list[Piece], view: memoryview, address: int, stream: Any) -> None:
        reader = self._reader
        assert reader is not None  # there is a group
        first, length = place(group)
        if reader.cold:
            self._announce(index)
        lead = reader.read(view, first, length)
        for piece in group:
            near = address + lead + piece.begin - first
            error = cu.cuMemcpyHtoDAsync(self._base + piece.target, near, piece.size, stream)
            if error:
                check("cuMemcpyHtoDAsync", error, "weights")

    def _announce(self, index: int) -> None:
        """Tells the disk what comes after group `index`.  Two threads at once may tell it the same twice."""
        begin, self._announced = max(self._announced, index), index + self._ahead
        if self._reader is not None:
            self._reader.announce([place(group) for group in self._groups[begin : index + self._ahead]])

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class Copy(NamedTuple):
    """`size` bytes at `source`, of the GPU or the CPU, that belong at `target` of the GPU.  `owner` keeps them."""

    target: int
    source: int
    size: int
    on_device: bool
    owner: object

    def enqueue(self, stream: Any) -> None:
        memory.copy(self.target, self.source, self.size, stream, source_on_device=self.on_device)


class Stage:
    """Room for new contents, as many bytes as they have.  A tensor of the GPU stays where it is, unless it lies in `weights`, the
    address and the bytes of what will be written.  The context is current.  `cleanup` frees the room."""

    def __init__(self, context: Context, weights: tuple[int, int], contents: Iterable[Contents], cleanup: ExitStack) -> None:
        self._context, self._weights, self._cleanup = context, weights, cleanup
        self._stream = check("cuStreamCreate", cu.cuStreamCreate(STREAM_NON_BLOCKING))
        cleanup.callback(cu.cuStreamDestroy, self._stream)
        size = sum(_aligned(each.bytes) for each in contents if not self._may_stay(each))
        try:
            self._next, self._host = (memory.allocate(size, "new weights") if size else 0), None
        except OutOfMemory:
            from ..cpu.weights import anonymous  # few programs are updated

            self._host = anonymous(size)
            self._next = ctypes.addressof(self._host)
        if size and self._host is None:
            cleanup.callback(memory.free, self._next)
        self._pieces: dict[OpenFile, list[Piece]] = {}
        self._copies: list[Copy] = []

    def add(self, row: Weight, contents: Contents, target: int) -> None:
        """Contents of a weight that lies at `target`.  Those of files arrive by `done`."""
        laid_out = contents.laid_out(row)
        if self._may_stay(contents):
            self._wait_for(laid_out)
            self._copies.append(Copy(target, laid_out.address, laid_out.bytes, True, laid_out))
            return
        place, self._next = self._next, self._next + _aligned(contents.bytes)
        self._copies.append(Copy(target, place, contents.bytes, self._host is None, self._host))
        if self._host is not None:
            laid_out.near().copy_to(place, row)
        elif laid_out.file is not None:
            self._pieces.setdefault(laid_out.file, []).append(Piece(laid_out.begin, laid_out.bytes, place))
        else:
            self._wait_for(laid_out)
            memory.copy(place, laid_out.address, laid_out.bytes, self._stream, source_on_device=laid_out.device is not None)
            check("cuStreamSynchronize", cu.cuStreamSynchronize(self._stream))  # pinned memory is read until then

    def done(self) -> list[Copy]:
        """What is left to do when all is there."""
        uploads = []
        for file, pieces in self._pieces.items():
            uploads.append(Upload(self._context, file.descriptor, sorted(pieces), 0))
            self._cleanup.callback(uploads[-1].stop)
        try:
            for upload in uploads:
                upload.wait()
        except BundleError as error:
            raise CallError("update-invalid", str(error)) from None
        return self._copies

    def _may_stay(self, contents: Contents) -> bool:
        begin, size = self._weights
        return contents.device is not None and not begin <= contents.address < begin + size

    def _wait_for(self, contents: Contents) -> None:
        """Until the caller's stream has made a tensor of the GPU."""
        if contents.device is not None and contents.library is not None:
            check("cuStreamSynchronize", cu.cuStreamSynchronize(contents.library.stream(contents.device) or 0))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
