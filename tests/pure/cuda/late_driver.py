"""The driver of `fake_driver`, as asynchronous as a real driver can be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tests.helpers.drivers.fake_driver import FakeDriver


class LateDriver(FakeDriver):
    """Delays the work of a stream until someone waits for it. Keeps the order that streams and events give."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[int, Callable[[], object], int] | None] = []
        self.marks: dict[int, tuple[int, int]] = {}
        self.working = False

    def later(self, stream: int, run: Callable[[], object], address: int = 0) -> None:
        """Enqueues `run`, which uses pinned memory at `address`."""
        if self.working:  # called from a node of a graph, which runs now
            run()
        else:
            self.queue.append((int(stream), run, address))

    def work(self, stream: int | None, end: int | None = None) -> None:
        """Runs work that is enqueued on a stream (None: on any), before item `end` if given."""
        for place, item in enumerate(self.queue[:end]):
            if item is not None and stream in (None, item[0]):
                self.queue[place] = None
                before, self.working = self.working, True
                item[1]()
                self.working = before

    def _memset(self, name: str, address: int, value: int, count: int, stream: int) -> None:
        run = super()._memset
        self.later(stream, lambda: run(name, address, value, count, stream))

    def do_cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        run = super().do_cuMemcpyDtoDAsync
        self.later(stream, lambda: run(target, source, size, stream))

    def do_cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        run = super().do_cuMemcpyHtoDAsync
        if self.is_pinned(source):
            self.later(stream, lambda: run(target, source, size, stream), source)
        else:  # the driver copies pageable memory at once
            kept = ctypes.create_string_buffer(ctypes.string_at(source, size), size)
            self.later(stream, lambda: run(target, ctypes.addressof(kept), size, stream))

    def do_cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> None:
        run = super().do_cuMemcpyDtoHAsync
        self.later(stream, lambda: run(target, source, size, stream), target)

    def do_cuMemcpy3DAsync(self, params: Any, stream: int) -> None:
        run = super().do_cuMemcpy3DAsync
        self.later(stream, lambda: run(params, stream))

    def do_cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> None:
        self.later(config.hStream, self._kernel(function, params))

    def do_cuGraphLaunch(self, graph: int, stream: int) -> None:
        run = super().do_cuGraphLaunch
        self.later(stream, lambda: run(graph, stream))

    def do_cuStreamSynchronize(self, stream: int) -> None:
        self.work(int(stream))

    def do_cuCtxSynchronize(self) -> None:
        self.work(None)

    def do_cuEventRecord(self, event: int, stream: int) -> None:
        self.marks[event] = (int(stream), len(self.queue))

    def do_cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        mark = self.marks.get(event)
        if mark is not None:
            self.later(stream, lambda: self.work(*mark))

    def do_cuEventSynchronize(self, event: int) -> None:
        self.work(*self.marks.get(event, (0, 0)))

    def do_cuMemFree(self, address: int) -> None:
        self.work(None)
        super().do_cuMemFree(address)

    def do_cuMemFreeHost(self, address: int) -> None:
        used = [item[2] for item in self.queue if item is not None]
        assert not [at for at in used if address <= at < address + self.pinned[address]], "copies may still use this memory"
        super().do_cuMemFreeHost(address)
