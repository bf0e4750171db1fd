"""A fake driver for several GPUs. Streams run their work later, in any order that the driver allows.

Work runs while a thread waits for a stream or an event; a random generator picks the next stream. A collective ends when all ranks
have entered it. If no stream can go on, all waiting collectives time out and write which rank is missing to their status word.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from cgbundle.validate.special_kernels import params, unpacked
from cgcompile.targets.collectives.exchange_memory import LIMIT, STATUS
from tests.helpers.drivers.fake_driver import FakeDriver, Handle

Work = Callable[[], bool]
"""Work on a stream. Returns whether it is done; otherwise it is called again later."""


class RanksDriver(FakeDriver):
    """`random` chooses which stream runs next."""

    def __init__(self, devices: int = 2, seed: int = 0) -> None:
        super().__init__(devices=devices)
        self.random, self.multiprocessors = Random(seed), 132
        self.queues: dict[int, deque[Work]] = {}
        self.events: dict[int, list[int]] = {}  # how often an event was recorded, and the last recording that was reached
        self.waiting: list[_Collective] = []
        self.sent: dict[tuple[tuple[int, ...], int], dict[int, tuple[int, list[bytes]]]] = {}
        self.epochs: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # address of a mapping -> handle of its memory in the exporting process
        self.imported: dict[int, int] = {}

    # --- streams ----------------------------------------------------------------------------------------------

    def _queue(self, stream: Any, work: Work) -> None:
        self.queues.setdefault(self._stream_key(stream), deque()).append(work)

    def _stream_key(self, stream: Any) -> int:
        """Returns the key of a stream: its handle. For a default stream, the context is added, because every device has one."""
        return int(stream or 0) + (0 if int(stream or 0) > 2 else int(self._current.stack[-1]) << 32)

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> Handle:
        self.retained += 1
        return Handle(7 + device)

    def _enqueue(self, stream: int, run: Callable[[], object]) -> None:
        self._queue(stream, lambda: run() is None or True)

    def do_cuStreamSynchronize(self, stream: int) -> None:
        stream_key = self._stream_key(stream)
        self._drain(lambda: not self.queues.get(stream_key))

    def settle(self) -> None:
        """Waits for all streams."""
        self._drain(lambda: not any(self.queues.values()))

    def do_cuEventSynchronize(self, event: int) -> None:
        recordings = self.events[int(event)][0] if int(event) in self.events else 0
        self._drain(lambda: self.events.get(int(event), [0, 0])[1] >= recordings)

    def _drain(self, done: Callable[[], bool]) -> None:
        while not done():
            streams = [stream for stream, queue in self.queues.items() if queue]
            self.random.shuffle(streams)
            for stream in streams:
                if self.queues[stream][0]():
                    self.queues[stream].popleft()
                    break
            else:
                assert self.waiting, "streams wait for each other"
                for collective in list(self.waiting):
                    collective.give_up()

    def do_cuEventRecord(self, event: int, stream: int) -> None:
        state = self.events.setdefault(int(event), [0, 0])
        state[0] += 1
        number = state[0]

        def reached() -> None:
            state[1] = max(state[1], number)

        self._enqueue(stream, reached)

    def do_cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        state = self.events.setdefault(int(event), [0, 0])
        number = state[0]
        self._queue(stream, lambda: state[1] >= number)

    def do_cuMemFree(self, address: int) -> None:
        self.settle()  # cuMemFree synchronizes the device
        super().do_cuMemFree(address)

    def do_cuMemFreeHost(self, address: int) -> None:
        self.settle()
        super().do_cuMemFreeHost(address)

    def do_cuMemFreeAsync(self, address: int, stream: int) -> None:
        self._enqueue(stream, lambda: self._drop(address))

    # --- work on streams ----------------------------------------------------------------------------------------------

    def do_cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert self.on_device(target) and not self.on_device(source)
        data = ctypes.string_at(source, size)  # the driver has read pageable memory when the call returns
        self._enqueue(stream, lambda: ctypes.memmove(target, data, size) and None)

    def do_cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert self.on_device(source) and not self.on_device(target)
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size) and None)

    def do_cuMemcpyPeerAsync(self, target: int, there: int, source: int, here: int, size: int, stream: int) -> None:
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size) and None)

    def do_cuGraphLaunch(self, graph: int, stream: int) -> None:
        for run in self._launched(graph):
            self._queue(stream, run if isinstance(run, _Collective) else lambda run=run: run() is None or True)

    def _kernel(self, handle: int, address: int) -> Any:
        symbol = self.functions[handle].symbol
        if not symbol.startswith(("cgcompile_packets_", "cgcompile_buffers_")):
            return super()._kernel(handle, address)
        return _Collective(self, symbol, address)

    def do_cuLaunchKernelEx(self, config: Any, function: int, params: int, extra: None) -> None:
        run = self._kernel(function, params)
        self._queue(config.hStream, run if isinstance(run, _Collective) else lambda: run() is None or True)

    def do_cuFuncGetParamInfo(self, function: int, index: int) -> Any:
        if not self.functions[function].symbol.startswith("cgcompile_"):
            return super().do_cuFuncGetParamInfo(function, index)
        param_info = params(self.devices)
        return (0, *param_info[index]) if index < len(param_info) else (1, None, None)

    def do_cuOccupancyMaxActiveBlocks(self, function: int, threads: int, shared: int) -> int:
        assert self.functions[function].symbol.startswith("cgcompile_")
        return 2

    def do_cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        return self.multiprocessors if attribute == 16 else super().do_cuDeviceGetAttribute(attribute, device)

    # --- memory peer ------------------------------------------------------------------------------------------

    def do_cuCtxEnablePeerAccess(self, context: int, flags: int) -> int:
        return 704

    def do_cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        return self.do_cuMemAlloc(size)

    def do_cuMemAddressFree(self, address: int, size: int) -> None:
        assert not any(address <= at < address + size for at in self.mapped)
        self.settle()
        self.epochs.clear()
        self.sent.clear()
        self._drop(address)

    def do_cuMemCreate(self, size: int, prop: Any, flags: int) -> Handle:
        assert not size % (2 << 20) and prop.location.type == 1
        return self._make("memory")

    def do_cuMemRelease(self, handle: int) -> None:
        self._drop(handle)

    def do_cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        self.mapped[address] = self.imported.get(int(handle), int(handle))

    def do_cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> int:
        descriptor = os.memfd_create("part")
        os.write(descriptor, str(int(handle)).encode())
        return descriptor

    def do_cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> Handle:
        handle = self._make("memory")
        self.imported[int(handle)] = int(os.pread(descriptor, 20, 0))
        return handle

    def do_cuMemUnmap(self, address: int, size: int) -> None:
        del self.mapped[address]

    def do_cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> None:
        assert address in self.mapped and access.flags == 3


class _Collective:
    """A launch of a collective kernel of cgcompile: an all_reduce of float32."""

    def __init__(self, driver: RanksDriver, symbol: str, address: int) -> None:
        world = driver.devices
        sizes = [size for _, size in params(world)]
        pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
        block = b"".join([ctypes.string_at(pointer or 0, size) for pointer, size in zip(pointers, sizes, strict=True)])
        self.source, self.target, *self.memories = struct.unpack_from(f"<{2 + world}Q", block)
        _, count, self.rank, _ = unpacked(world, block)
        self.driver, self.size, self.world = driver, count * (8 if "packets" in symbol else 16), world
        self.epoch = -1

    @property
    def mine(self) -> int:
        return self.memories[self.rank]

    def world_of(self) -> tuple[int, ...]:
        """Returns the memory handles of all ranks, which are the same in every process."""
        return tuple([self.driver.mapped[at] for at in self.memories])

    def _word(self, at: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.mine + at)

    def __call__(self) -> bool:
        driver = self.driver
        if self.epoch < 0:
            self.epoch = driver.epochs[self.mine] = driver.epochs.get(self.mine, 0) + 1
            data = [ctypes.string_at(self.source, self.size)] * self.world
            driver.sent.setdefault((self.world_of(), self.epoch), {})[self.rank] = self.size, data
            driver.waiting.append(self)
        arrivals = driver.sent[self.world_of(), self.epoch]
        if not self._word(STATUS).value:
            if len(arrivals) < self.world or len({size for size, _ in arrivals.values()}) > 1:
                return False
            numbers = [struct.unpack(f"<{self.size // 4}f", arrivals[rank][1][self.rank]) for rank in range(self.world)]
            ctypes.memmove(self.target, struct.pack(f"<{self.size // 4}f", *map(sum, zip(*numbers, strict=True))), self.size)
        driver.waiting.remove(self)
        self.epoch = -1  # the next launch of the graph is a new collective
        return True

    def give_up(self) -> None:
        """Times out: writes the first missing rank to the status word."""
        assert ctypes.c_uint64.from_address(self.mine + LIMIT).value, "it would wait for ever"
        arrivals = self.driver.sent[self.world_of(), self.epoch]
        missing = [rank for rank in range(self.world) if rank not in arrivals or arrivals[rank][0] != self.size]
        if missing:
            self._word(STATUS).value = 1 + missing[0]
