"""The weights from the file into GPU memory, as fast as the bus takes them.

A copy from a mapped file is pageable: the driver's one thread moves it at 10.8 GB/s.  Pinned memory moves at 55 GB/s, but pinning
costs 0.5 ms a megabyte, more than it gains for all of a file.  So a few threads read the file into small pinned buffers, each sent
on while the next is read; what is small goes as it is.

A file that is larger than half of the machine's memory is dropped from the system's cache behind the reading: it would push
everything else out, and its beginning would be gone at its end.

New contents for a loaded program are brought near before any of them is put in its place: to the GPU, where it has room.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BundleError, CallError, CgbundleError, OutOfMemory
from ..format.archive import WEIGHTS, Archive, weight_files
from ..format.safetensors import Entry
from ..format.schema import Weight
from ..format.spans import HOST_ONLY
from . import memory
from .driver import Context, Relaxed, check, cu
from .libcuda import STREAM_NON_BLOCKING

if TYPE_CHECKING:
    from ..session.weight_contents import Contents, OpenFile

ALIGNMENT = 256
"""Of a weight, in bytes: as in memory weights."""

CHUNK = 2 << 20
"""Bytes that are read at a time, into a buffer.  Larger ones leave the processor's cache before they are sent."""

AHEAD = 256 << 20
"""Bytes that the disk begins to read while the driver starts."""


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


def listed(bundle: Archive) -> dict[str, list[Piece]]:
    """By file, what of the bundle's weights belongs on the GPU; the disk begins to read.  Raises weights-invalid."""
    found = {}
    for file, weights in weight_files(bundle.manifest).items():
        rows = [weight for weight in weights if weight.memory == "weights"]
        if rows and (parts := _listed(bundle, file, rows)):
            found[file] = parts
    return found


def _listed(bundle: Archive, name: str, rows: Sequence[Weight]) -> list[Piece]:
    found = pieces(rows, bundle.tensors(name), dict(bundle.manifest.memories).get("weights", 0), name)
    file, left = bundle.descriptor(name), AHEAD
    for piece in found:
        for begin in range(piece.begin, piece.begin + min(piece.size, left), CHUNK):  # the system reads no more than that per call
            os.posix_fadvise(file, begin, min(CHUNK, piece.begin + piece.size - begin), os.POSIX_FADV_WILLNEED)
        left = max(0, left - piece.size)
    return found


def pieces(weights: Sequence[Weight], entries: Mapping[str, Entry], capacity: int, file: str = WEIGHTS) -> list[Piece]:
    """Where the bytes of a file go, in the file's order: tied weights once, what is adjacent in both places as one.  `capacity`:
    bytes of memory weights; `file`: its name.  Raises weights-invalid where the file lacks a weight or the memory is too small."""
    found = set()
    for weight in weights:
        entry = entries.get(weight.tensor)
        if entry is None:
            raise BundleError("weights-invalid", f"{file}: no tensor {weight.tensor!r}, which weight {weight.name!r} names")
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
        self._context, self._file, self._base = context, file, base
        self._way = how or way(sum(piece.size for piece in listed))
        self._work = chunks(listed, self._way.chunk)
        self._work.reverse()  # pop takes the first
        self._total = len(self._work)
        self._drop = bool(listed) and 2 * os.fstat(file).st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._sent: list[None] = []  # one item per group that arrived: appending is atomic
        self._failure: CgbundleError | OSError | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(min(self._way.threads, self._total))]
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
        work, sent, buffers = self._work, self._sent, self._way.buffers
        made: list[Buffer] = []
        for number in count():
            try:
                group = work.pop()
            except IndexError:
                break
            if number < buffers:  # while the first one travels: pinning takes as long as reading
                made.append(self._buffer(cleanup))
            view, address, stream = made[number % buffers]
            if number >= buffers:
                check("cuStreamSynchronize", cu.cuStreamSynchronize(stream), "weights")
            self._send(group, view, address, stream)
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
            error = cu.cuMemcpyHtoDAsync(self._base + piece.target, place, piece.size, stream)
            if error:
                check("cuMemcpyHtoDAsync", error, "weights")
        if self._drop:
            os.posix_fadvise(self._file, first, length, os.POSIX_FADV_DONTNEED)


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
