"""One rank of a model over several GPUs, in a process of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ..cuda.background import ContextFuture
from ..cuda.driver import Context, check, check_device, cu
from ..errors import CallError
from ..format.archive import Archive
from ..gpu.backend import CudaBackend
from ..gpu.outputs import DeviceOutputs, HostOutputs
from ..tensors.library import caller_captures
from ..validate.bundle import check_rank
from .exchanging import SECOND, ExchangingBackend, begin_part, check_room, create_part, export_part, import_part, map_part, reserve
from .rendezvous import meet


class OneRankBackend(ExchangingBackend):
    """A rank's backend.  Each process calls its own, the same entries with the same sizes in the same order.

    `bundle` is the rank's, `whole` rank 0's.  The processes meet at `rendezvous`, a path of this host, and wait for each other for
    `timeout` seconds, there and at every call: from then on all calls raise rank-timeout, or ranks-unlike where another rank has
    called something else.  `seed` is the same for all ranks.

    Raises as `CudaBackend`, and what `rendezvous.meet` does.
    """

    def __init__(
        self, bundle: Archive, whole: Archive, device: int, rendezvous: str, mode: str = "graph", *,
        context: Context | None = None, threads: int | None = None, timeout: float = 30.0,
    ) -> None:  # fmt: skip
        world = bundle.manifest.world
        assert world is not None
        self._world, self._timeout = world, timeout
        with ExitStack() as undo:
            mine = context or Context(device)
            undo.callback(mine.release)
            check_device(bundle.manifest.target, mine)
            outside = undo.enter_context(ExitStack())
            with mine:
                self._base = reserve(world, mine, outside)
                self._begin_statuses(mine, outside)
                handle = create_part(world, mine, outside, shared=True)
                map_part(world, self._part(world.rank), handle, [mine], outside)
                begin_part(world, self._part(world.rank), int(timeout * SECOND), mine.stream)
                descriptor = export_part(handle)
                try:
                    digest = hashlib.sha256(whole.text).hexdigest()
                    parts, self._board, self.seed = meet(rendezvous, world.rank, world.size, digest, descriptor, timeout)
                finally:
                    os.close(descriptor)
                outside.callback(self._board.close)
                try:
                    for rank, part in enumerate(parts):
                        if rank != world.rank:
                            map_part(world, self._part(rank), import_part(part, mine, outside), [mine], outside)
                finally:
                    for part in parts:
                        os.close(part)
            mine.retain()
            CudaBackend.__init__(self, bundle, device, mode, context=mine, lazy=False, threads=threads, peer=self._base)
            undo.callback(CudaBackend.close, self)
            with mine:
                check_room(self, bundle, 1)
            self._outside = undo.pop_all()

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> DeviceOutputs | HostOutputs:
        """Replays this rank.  That another one called something else, or none has come, is raised after a call from the CPU, and of
        calls that nobody waited for before the next one."""
        self._check()
        if device is None and caller_captures():
            return super().run(program, addresses, device, stream)  # which refuses it
        self._board.call(program)
        results = super().run(program, addresses, device, stream)
        self._note(self._world.rank, stream)
        if device is None:
            check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
            self._check()
        return results

    def _check(self) -> None:
        """Raises ranks-unlike or rank-timeout; from then on every call does."""
        try:
            self._board.check()
        except CallError as error:
            self._failed = error
            raise
        self._check_ranks()


def open_rank(
    bundle: Archive, others: list[Archive], device: int, meeting: tuple[int, str], mode: str, *, context: ContextFuture,
    threads: int | None, timeout: float,
) -> CudaBackend:  # fmt: skip
    """The backend of one rank; its bundle is added to `others`, to be closed, where it is not `bundle` itself."""
    rank, path = meeting
    world = bundle.manifest.world
    assert world is not None
    if not 0 <= rank < world.size:
        raise CallError("ranks-refused", f"rank={rank}: the model has {world.size} ranks, 0 to {world.size - 1}")
    if rank:
        others.append(check_rank(bundle, rank))
    own = others[0] if rank else bundle
    return OneRankBackend(own, bundle, device, path, mode, context=context.take(), threads=threads, timeout=timeout)
