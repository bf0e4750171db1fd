"""A model over several GPUs: one process drives all ranks, or each rank has its own process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..call.locks import during
from ..cuda import memory
from ..cuda.driver import Context, call, cu
from ..cuda.libcuda import EVENT_DISABLE_TIMING, MEM_FILE_DESCRIPTOR, PEER_ENABLED_BEFORE
from ..errors import CallError, MachineError
from ..format.archive import Archive
from ..gpu.backend import CudaBackend
from ..gpu.device_bundle import check_device
from ..gpu.streams import DeviceOutputs, HostOutputs
from ..process import ContextFuture
from ..tensors.library import caller_captures
from ..validate.bundle import check_rank, check_ranks
from .exchanging import (
    SECOND,
    ExchangingBackend,
    call_in_context,
    check_occupancy,
    connect_ranks,
    create_part,
    initialize_part,
    map_part,
    reserve,
    unsupported,
)  # fmt: skip


class RanksBackend(ExchangingBackend):
    """Rank 0's backend, which drives the other ranks. Inputs are copied to every rank; outputs are rank 0's. `others`: bundles of
    the other ranks; `devices`: the GPU of each rank, for as many ranks as run at once. After `timeout` seconds of waiting for a
    rank all calls raise rank-timeout. Raises as `CudaBackend`, and wrong-machine if a device cannot access another's memory."""

    def __init__(
        self, bundle: Archive, others: Sequence[Archive], devices: Sequence[int], mode: str = "graph", *,
        context: Context | None = None, poison: int | None = None, threads: int | None = None, timeout: float = 30.0,
    ) -> None:  # fmt: skip
        world = bundle.manifest.world
        assert world is not None
        self._world, self._timeout = world, timeout
        self._others: list[CudaBackend] = []
        with ExitStack() as undo:
            self._ranks = contexts = _contexts(bundle, devices, context, undo)
            cleanup = undo.enter_context(ExitStack())  # for memory peer and events, which outlive the backends
            with contexts[0]:
                self._peer_base = base = reserve(world, contexts[0], cleanup)
                self._allocate_statuses(contexts[0], cleanup)
            for rank, peer in enumerate(contexts):
                with peer:
                    map_part(world, self._part_address(rank), create_part(world, peer, cleanup), contexts, cleanup)
                    initialize_part(world, self._part_address(rank), int(timeout * SECOND), peer.stream)
            self._ready = _event(contexts[0], cleanup)
            self._done = [_event(peer, cleanup) for peer in contexts[1:]]

            options: Any = {"poison": poison, "lazy": False, "threads": threads, "peer": base}

            def opened(rank: int) -> CudaBackend:
                contexts[rank].retain()
                return CudaBackend(others[rank - 1], devices[rank], mode, context=contexts[rank], **options)

            with ThreadPoolExecutor(len(others), "cgbundle-rank") as pool:
                loading = [pool.submit(opened, rank) for rank in range(1, world.size)]
                try:
                    contexts[0].retain()
                    super().__init__(bundle, devices[0], mode, context=contexts[0], **options)
                    undo.callback(CudaBackend.close, self)
                finally:
                    for future in loading:
                        if future.exception() is None:
                            undo.callback(future.result().close)
            self._others = [future.result() for future in loading]
            for backend, opened_bundle, peer in zip((self, *self._others), (bundle, *others), contexts, strict=True):
                with peer:
                    check_occupancy(backend, opened_bundle, [other.device for other in contexts].count(peer.device))
            self._peer_cleanup = undo.pop_all()

    # --- running ----------------------------------------------------------------------------------------------

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> DeviceOutputs | HostOutputs:
        """Replays on all ranks, rank 0 last. Errors of a rank are raised at the next call, or after a call with inputs on the
        CPU."""
        self._check_ranks()
        if device is None and caller_captures():
            return super().run(program, addresses, device, stream)  # refuses the call
        if device is not None:
            self._give_inputs(program, addresses, stream)
        for number, other in enumerate(self._others):
            self._follow(number, other, program, addresses if device is None else None)
        results = super().run(program, addresses, device, stream)
        self._copy_status(0, stream)
        if device is None:
            call("cuStreamSynchronize", stream)
            for other in self._others:
                during(other, None, lambda handle: call("cuStreamSynchronize", handle))
            self._check_ranks()
        return results

    def _give_inputs(self, program: int, addresses: Sequence[int], stream: Any) -> None:
        """Copies inputs from rank 0's device to the other ranks' static buffers, after their previous call, and records an
        event."""
        for number, other in enumerate(self._others):
            call("cuStreamWaitEvent", stream, self._done[number], 0)
            target_context, source_context = self._ranks[number + 1].handle, self._ranks[0].handle
            for address, place in zip(addresses, other._bound[program].inputs, strict=True):
                if place.size:
                    call("cuMemcpyPeerAsync", place.target, target_context, address, source_context, place.size, stream)
        call("cuEventRecord", self._ready, stream)

    def _follow(self, number: int, other: CudaBackend, program: int, addresses: Sequence[int] | None) -> None:
        """Replays on another rank. `addresses`: inputs on the CPU; None if the inputs were copied before."""

        def replay(stream: Any) -> None:
            bound = other._bound[program]
            if addresses is None:
                call("cuStreamWaitEvent", stream, self._ready, 0)
            else:
                for address, place in zip(addresses, bound.inputs, strict=True):
                    memory.copy(place.target, address, place.size, stream, source_on_device=False)
            for step in bound.steps:
                step(stream)
            self._copy_status(number + 1, stream)
            call("cuEventRecord", self._done[number], stream)

        during(other, None, replay)

    def _rank_name(self, rank: int) -> str:
        return f"rank {rank} on device {self._ranks[rank].index}"

    # --- what lasts from call to call -------------------------------------------------------------------------

    def store(self, weight: int, address: int, device: int | None, stream: Any) -> None:
        """Stores the state of the random numbers on all ranks. Raises ranks-refused for other state."""
        if weight != self._manifest.random:
            raise unsupported("writing state other than random numbers, because each rank has its own")
        super().store(weight, address, device, stream)
        for other in self._others:
            during(other, None, partial(other.store, weight, address, device))

    def reset(self, stream: Any) -> None:
        super().reset(stream)
        for other in self._others:
            during(other, None, other.reset)

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        super().poison(byte, reserved=reserved)
        for other in self._others:
            other.poison(byte, reserved=reserved)


def _contexts(bundle: Archive, devices: Sequence[int], first: Context | None, cleanup: ExitStack) -> list[Context]:
    """A context for each rank, released by `cleanup`. Raises ranks-refused, wrong-machine."""
    world = bundle.manifest.world
    assert world is not None
    if len(devices) != world.size:
        if first is not None:
            first.release()
        text = f"the model is over {world.size} GPUs, devices={list(devices)} are {len(devices)}"
        raise CallError("ranks-refused", text, f"devices={list(range(world.size))}, or leave devices out")
    contexts: list[Context] = []
    for rank, device in enumerate(devices):
        contexts.append(first if first is not None and not rank else Context(device))
        cleanup.callback(contexts[-1].release)
        check_device(bundle.manifest.target, contexts[-1])
    for context in contexts:
        with context:
            for other in contexts:
                if other.device != context.device:
                    error = cu.cuCtxEnablePeerAccess(other.handle, 0)
                    if error not in (0, PEER_ENABLED_BEFORE):
                        text = f"device {context.index} cannot reach the memory of device {other.index}"
                        hint = "`nvidia-smi topo -p2p w` shows which GPUs of this machine reach each other"
                        raise MachineError("wrong-machine", text, hint)
    return contexts


def _event(context: Context, cleanup: ExitStack) -> Any:
    with context:
        event = call("cuEventCreate", EVENT_DISABLE_TIMING)
    cleanup.callback(call_in_context, context, "cuEventDestroy", event)
    return event


def open_ranks(
    bundle: Archive, others: list[Archive], devices: Sequence[int] | None, mode: str, *, context: ContextFuture, poison: int | None,
    threads: int | None, timeout: float,
) -> CudaBackend:  # fmt: skip
    """The backend of a model over several devices. Adds the other ranks' bundles to `others`, which the caller closes."""
    world = bundle.manifest.world
    assert world is not None
    others += check_ranks(bundle)
    chosen = range(world.size) if devices is None else devices
    cuda_context = context.take()
    return RanksBackend(bundle, others, chosen, mode, context=cuda_context, poison=poison, threads=threads, timeout=timeout)


# --- one rank, in a process of its own ----------------------------------------------------------------------------------


class OneRankBackend(ExchangingBackend):
    """A rank's backend; each process makes the same calls in the same order. `bundle` is this rank's, `whole` is rank 0's. The
    processes connect at `rendezvous`, a path of this host. They wait for each other for `timeout` seconds, there and in every call;
    after that all calls raise rank-timeout, or ranks-unlike if another rank made another call. `seed` is equal on all ranks. Raises
    as `CudaBackend` and `connect_ranks`."""

    def __init__(
        self, bundle: Archive, whole: Archive, device: int, rendezvous: str, mode: str = "graph", *,
        context: Context | None = None, threads: int | None = None, timeout: float = 30.0,
    ) -> None:  # fmt: skip
        world = bundle.manifest.world
        assert world is not None
        self._world, self._timeout = world, timeout
        with ExitStack() as undo:
            own_context = context or Context(device)
            undo.callback(own_context.release)
            check_device(bundle.manifest.target, own_context)
            cleanup = undo.enter_context(ExitStack())
            with own_context:
                self._peer_base = reserve(world, own_context, cleanup)
                self._allocate_statuses(own_context, cleanup)
                handle = create_part(world, own_context, cleanup, shared=True)
                map_part(world, self._part_address(world.rank), handle, [own_context], cleanup)
                initialize_part(world, self._part_address(world.rank), int(timeout * SECOND), own_context.stream)
                descriptor = int(call("cuMemExportToShareableHandle", handle, MEM_FILE_DESCRIPTOR, 0))
                try:
                    digest = hashlib.sha256(whole.text).hexdigest()
                    parts, self._call_log, self.seed = connect_ranks(
                        rendezvous, world.rank, world.size, digest, descriptor, timeout
                    )
                finally:
                    os.close(descriptor)
                cleanup.callback(self._call_log.close)
                try:
                    for rank, part in enumerate(parts):
                        if rank != world.rank:
                            handle = int(call("cuMemImportFromShareableHandle", part, MEM_FILE_DESCRIPTOR, detail="memory peer"))
                            cleanup.callback(call_in_context, own_context, "cuMemRelease", handle)
                            map_part(world, self._part_address(rank), handle, [own_context], cleanup)
                finally:
                    for part in parts:
                        os.close(part)
            own_context.retain()
            CudaBackend.__init__(self, bundle, device, mode, context=own_context, lazy=False, threads=threads, peer=self._peer_base)
            undo.callback(CudaBackend.close, self)
            with own_context:
                check_occupancy(self, bundle, 1)
            self._peer_cleanup = undo.pop_all()

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: Any) -> DeviceOutputs | HostOutputs:
        """Replays this rank. If another rank makes another call or none, this or the next call raises an error."""
        self._check()
        if device is None and caller_captures():
            return super().run(program, addresses, device, stream)  # refuses the call
        self._call_log.record(program)
        results = super().run(program, addresses, device, stream)
        self._copy_status(self._world.rank, stream)
        if device is None:
            call("cuStreamSynchronize", stream)
            self._check()
        return results

    def _check(self) -> None:
        """Raises ranks-unlike or rank-timeout, and makes every later call raise it."""
        try:
            self._call_log.compare()
        except CallError as error:
            self._failed = error
            raise
        self._check_ranks()


def open_rank(
    bundle: Archive, others: list[Archive], device: int, meeting: tuple[int, str], mode: str, *, context: ContextFuture,
    threads: int | None, timeout: float,
) -> CudaBackend:  # fmt: skip
    """The backend of one rank. Adds its bundle to `others`, which the caller closes, unless it is `bundle`."""
    rank, path = meeting
    world = bundle.manifest.world
    assert world is not None
    if not 0 <= rank < world.size:
        raise CallError("ranks-refused", f"rank={rank}: the model has {world.size} ranks, 0 to {world.size - 1}")
    if rank:
        others.append(check_rank(bundle, rank))
    rank_bundle = others[0] if rank else bundle
    return OneRankBackend(rank_bundle, bundle, device, path, mode, context=context.take(), threads=threads, timeout=timeout)
