"""Runs collectives on several GPUs of one process: exchange memory, and graphs of launches on each GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

from cgcompile.targets.collectives.exchange_memory import LIMIT, STATUS, ExchangeMemory
from cgcompile.targets.collectives.kernels import Combine, collective_image, symbol
from cgcompile.targets.collectives.launches import CollectiveLaunch

ENABLED_BEFORE = 704
"""CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED."""


class Collective(NamedTuple):
    """A launch on every rank. `inputs`, `outputs`: an address per rank; `stride` as in `kernels.params`. `sender` -1: all ranks."""

    launch: CollectiveLaunch
    combine: Combine
    inputs: Sequence[int]
    outputs: Sequence[int]
    stride: int = 0
    sender: int = -1


class Ranks:
    """The first GPUs, one rank on each, in torch's contexts. `limit`: nanoseconds that a kernel waits, 0 for no limit."""

    def __init__(self, memory: ExchangeMemory, limit: int = 10**9) -> None:
        self.layout, self.world = memory, memory.world
        major, minor = torch.cuda.get_device_capability()
        image = collective_image(f"sm_{major}{minor}", memory)
        self.memories = [torch.zeros(memory.bytes, dtype=torch.uint8, device=f"cuda:{rank}") for rank in range(self.world)]
        self.streams = [torch.cuda.Stream(rank) for rank in range(self.world)]
        self.events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.world)]
        self._modules = []
        for rank in range(self.world):
            self._current(rank)
            for other in range(self.world):
                if other != rank:
                    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(other))))
                    (error,) = driver.cuCtxEnablePeerAccess(context, 0)
                    assert int(error) in (0, ENABLED_BEFORE), error
            self._modules.append(check(driver.cuModuleLoadData(image)))
            self._word(rank, LIMIT, limit, torch.int64)
        self.wait()

    def graph(self, collectives: Sequence[Collective]) -> list[Any]:
        """Returns a graph for every rank with all collectives in order."""
        senders = (1 << self.world) - 1
        bases = [memory.data_ptr() for memory in self.memories]
        types = (ctypes.c_void_p,) * (self.world + 2) + (ctypes.c_uint64,) + (ctypes.c_uint32,) * 3
        executables = []
        for rank in range(self.world):
            self._current(rank)
            graph = check(driver.cuGraphCreate(0))
            before: list[Any] = []
            for launch, combine, inputs, outputs, stride, sender in collectives:
                node = driver.CUDA_KERNEL_NODE_PARAMS()
                node.func = check(driver.cuModuleGetFunction(self._modules[rank], symbol(launch.way, combine).encode()))
                node.gridDimX, node.gridDimY, node.gridDimZ = launch.blocks, 1, 1
                node.blockDimX, node.blockDimY, node.blockDimZ = launch.threads, 1, 1
                values = (inputs[rank], outputs[rank], *bases, stride, launch.count, rank, 1 << sender if sender >= 0 else senders)
                node.kernelParams = (values, types)
                before = [check(driver.cuGraphAddKernelNode(graph, before, len(before), node))]
            executables.append(check(driver.cuGraphInstantiate(graph, 0)))
        return executables

    def replay(self, graphs: Sequence[Any], ranks: Sequence[int] = ()) -> float:
        """Launches the graphs of `ranks` (default: all) and waits. Returns the milliseconds of the fastest rank."""
        chosen = ranks or range(self.world)
        for rank in range(self.world):  # wait: other streams may still fill the inputs
            torch.cuda.synchronize(rank)
        for rank in chosen:
            self._current(rank)
            begin, end = self.events[rank]
            begin.record(self.streams[rank])
            check(driver.cuGraphLaunch(graphs[rank], self.streams[rank].cuda_stream))
            end.record(self.streams[rank])
        self.wait()
        return min(self.events[rank][0].elapsed_time(self.events[rank][1]) for rank in chosen)

    def wait(self) -> None:
        """Waits until all streams are idle. Raises AssertionError after 20 seconds: then a kernel waits forever."""
        until = time.monotonic() + 20
        for rank in range(self.world):
            while not self.streams[rank].query():
                assert time.monotonic() < until, f"rank {rank} waits for ever"
            torch.cuda.synchronize(rank)

    def status(self) -> list[int]:
        """Returns for every rank 0, or 1 + the rank for which it waited until the time limit."""
        return [int(memory[STATUS : STATUS + 4].view(torch.int32).item()) for memory in self.memories]

    def _word(self, rank: int, at: int, value: int, dtype: torch.dtype) -> None:
        self.memories[rank][at : at + dtype.itemsize].view(dtype).fill_(value)

    def _current(self, rank: int) -> None:
        torch.cuda.set_device(rank)
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(rank))))))


def check(result: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call; asserts that there is no error."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else None
