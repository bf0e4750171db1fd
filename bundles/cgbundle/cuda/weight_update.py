"""New contents for a loaded program: brought near before any of them is put in its place, to the GPU where it has room."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BundleError, CallError, OutOfMemory
from ..format.schema import Weight
from . import memory
from .driver import Context, check, cu
from .libcuda import STREAM_NON_BLOCKING
from .weight_pieces import Piece
from .weight_upload import Upload

if TYPE_CHECKING:
    from ..session.weight_contents import Contents, OpenFile

ALIGNMENT = 256
"""Of a weight, in bytes: as in memory weights."""


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
        """Until the caller's stream has made a tensor of the GPU."""
        if contents.device is not None and contents.library is not None:
            check("cuStreamSynchronize", cu.cuStreamSynchronize(contents.library.stream(contents.device) or 0))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
