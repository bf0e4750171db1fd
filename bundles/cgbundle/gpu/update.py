"""New weights for a program on a GPU: copied to the GPU, or to host memory if it has too little, before any weight changes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ..call.update import Contents, OpenFile
from ..cpu.host_weights import HostWeights, anonymous
from ..cuda import memory
from ..cuda.driver import Context, Relaxed, call, cu
from ..cuda.libcuda import STREAM_NON_BLOCKING
from ..cuda.memory import Piece
from ..cuda.upload import Upload
from ..errors import BundleError, CallError, OutOfMemory
from ..format.schema import Weight

if TYPE_CHECKING:
    from .device_bundle import DeviceBundle

ALIGNMENT = 256  # bytes, of a weight


class WeightCopy(NamedTuple):
    """`size` bytes at `source` (GPU or CPU) that belong at `target` on the GPU. `owner` keeps them alive."""

    target: int
    source: int
    size: int
    on_device: bool
    owner: object

    def enqueue(self, stream: Any) -> None:
        memory.copy(self.target, self.source, self.size, stream, source_on_device=self.on_device)


class WeightStage:
    """Memory for new contents. A GPU tensor stays in place unless it overlaps `weights`, (address, bytes) of what will be written.
    Needs the current context. `cleanup` frees the memory."""

    def __init__(self, context: Context, weights: tuple[int, int], contents: Iterable[Contents], cleanup: ExitStack) -> None:
        self._context, self._weights, self._cleanup = context, weights, cleanup
        self._stream = call("cuStreamCreate", STREAM_NON_BLOCKING)
        cleanup.callback(cu.cuStreamDestroy, self._stream)
        size = sum(_aligned(value.bytes) for value in contents if not self._may_stay(value))
        self._host: Any = None
        try:
            self._next = memory.allocate(size, "new weights") if size else 0
        except OutOfMemory:
            self._host = anonymous(size)
            self._next = ctypes.addressof(self._host)
        if size and self._host is None:
            cleanup.callback(call, "cuMemFree", self._next)
        self._pieces: dict[OpenFile, list[Piece]] = {}
        self._copies: list[WeightCopy] = []

    def add(self, row: Weight, contents: Contents, target: int) -> None:
        """Adds contents for a weight at `target`. Those of files are complete after `done`."""
        laid_out = contents.laid_out(row)
        if self._may_stay(contents):
            self._wait_for(laid_out)
            self._copies.append(WeightCopy(target, laid_out.address, laid_out.bytes, True, laid_out))
            return
        place, self._next = self._next, self._next + _aligned(contents.bytes)
        self._copies.append(WeightCopy(target, place, contents.bytes, self._host is None, self._host))
        if self._host is not None:
            laid_out.near().copy_to(place, row)
        elif laid_out.file is not None:
            self._pieces.setdefault(laid_out.file, []).append(Piece(laid_out.begin, laid_out.bytes, place))
        else:
            self._wait_for(laid_out)
            memory.copy(place, laid_out.address, laid_out.bytes, self._stream, source_on_device=laid_out.device is not None)
            call("cuStreamSynchronize", self._stream)  # pinned memory is read until then

    def done(self) -> list[WeightCopy]:
        """The copies to the weights, after all contents have arrived."""
        uploads = []
        for file, pieces in self._pieces.items():
            uploads.append(Upload(self._context, file.descriptor, sorted(pieces), 0, name=file.path))
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
        """Waits until the caller's stream has written a GPU tensor."""
        if contents.device is not None and contents.library is not None:
            call("cuStreamSynchronize", contents.library.stream(contents.device) or 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def update(
    shared: DeviceBundle,
    contents: Mapping[int, Contents],
    sessions: Sequence[Any],
    files: Sequence[OpenFile],
    ready: Callable[[], None],
) -> None:
    """`Backend.update`: waits for calls of all sessions, and copies the weights to their fixed places. The caller holds a share of
    `shared`."""
    rows = shared.manifest.weights
    with shared.updating, shared.context as context, Relaxed(), ExitStack() as cleanup:
        stage = WeightStage(context, (shared.base, shared.sizes[memory.WEIGHTS]), contents.values(), cleanup)
        for index, value in contents.items():
            if rows[index].memory != memory.HOST and value.bytes:
                stage.add(rows[index], value, shared.base + rows[index].offset)
        copies, hosted = stage.done(), _host_weights(shared, contents)
        for file in files:
            file.check_unchanged()
        for session in sessions:
            session.gate.acquire()
            cleanup.callback(session.gate.release)
        ready()
        _replace(shared, [session for session in sessions if not session.closed], copies, hosted)


def _replace(shared: DeviceBundle, sessions: Sequence[Any], copies: Sequence[WeightCopy], hosted: HostWeights | None) -> None:
    stream = shared.context.stream
    regions = [(session.host, session.host.over(hosted)) for session in sessions if session.host is not None and hosted is not None]
    for session in sessions:
        session.order.wait()
    for copy in copies:
        copy.enqueue(stream)
    call("cuStreamSynchronize", stream, detail="update")
    if hosted is not None:
        shared.hosted = hosted
        for host, opened in regions:
            host.take(opened, hosted)
    shared.updated = True


def _host_weights(shared: DeviceBundle, contents: Mapping[int, Contents]) -> HostWeights | None:
    """The new weights of host regions; None if they do not change."""
    rows = shared.manifest.weights
    read = {rows[index].tensor for region in shared.manifest.regions for _, index in region.constants}
    chosen = {rows[index]: value for index, value in contents.items() if rows[index].tensor in read}
    return shared.hosted.updated(list(chosen), list(chosen.values())) if shared.hosted is not None and chosen else None
