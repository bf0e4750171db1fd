"""Large inputs and outputs on the host, on a fake driver. Bytes are right with any number of threads, pinned memory is copied
directly, no object remains, and a failure of any thread reaches the caller."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgbundle.cuda import driver, memory
from cgbundle.cuda.driver import Context
from cgbundle.errors import CgbundleError, MachineError
from cgbundle.gpu import streams, threaded_copies
from cgbundle.gpu.streams import HostCopies
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import KEYS, expected, inputs
from tests.helpers.drivers.cuda_calls import opened
from tests.helpers.drivers.fake_driver import FakeDriver, install

LARGE, CHUNK = 64, 256
TO, FROM = "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LARGE", LARGE)
    monkeypatch.setattr(threaded_copies, "CHUNK", CHUNK)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


class Room:
    """Copies between arrays of the host and `size` bytes of the GPU, in both directions."""

    def __init__(self, cleanup: ExitStack, size: int) -> None:
        self.context = Context(0)
        cleanup.callback(self.context.release)
        cleanup.enter_context(self.context)
        self.stream, self.size = self.context.stream, size
        self.gpu = memory.allocate(max(1, size), "room")
        cleanup.callback(driver.call, "cuMemFree", self.gpu)
        self.copies = HostCopies(self.context, cleanup)

    def there_and_back(self, seed: int) -> None:
        data = bytes((seed + 31 * i) % 251 for i in range(self.size))
        source, target = ctypes.create_string_buffer(data, max(1, self.size)), ctypes.create_string_buffer(self.size + 8)
        self.copies.to_device(self.gpu, ctypes.addressof(source), self.size, self.stream)
        self.copies.to_host(ctypes.addressof(target), self.gpu, self.size, self.stream)
        assert target.raw == data + bytes(8)


@pytest.fixture
def cleanup(fake: FakeDriver) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 9 * CHUNK), min_size=1, max_size=3), threads=st.integers(1, 4))
def test_every_byte_arrives(fake: FakeDriver, sizes: list[int], threads: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threaded_copies, "THREADS", threads)
        for seed, size in enumerate(sizes):
            with ExitStack() as cleanup:
                room = Room(cleanup, size)
                room.there_and_back(seed)
                room.there_and_back(seed + 1)


def test_what_is_small_is_one_copy_and_pins_nothing(fake: FakeDriver, cleanup: ExitStack) -> None:
    room = Room(cleanup, LARGE - 1)
    room.there_and_back(0)
    assert fake.calls.count(TO) == fake.calls.count(FROM) == 1 and not fake.pinned


def test_threads_share_and_the_memory_is_kept(fake: FakeDriver, cleanup: ExitStack) -> None:
    room, before = Room(cleanup, 9 * CHUNK), threading.active_count()
    for seed in range(3):
        room.there_and_back(seed)
    assert fake.calls.count(TO) == fake.calls.count(FROM) == 27
    assert fake.calls.count("cuMemHostRegister") == 1 and threading.active_count() == before
    assert len(room.copies._large()._slots) == threaded_copies.THREADS


def test_no_more_threads_than_processors(fake: FakeDriver, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    room = Room(cleanup, 4 * CHUNK)
    room.there_and_back(0)
    assert len(room.copies._large()._slots) == 1


def test_pinned_memory_is_copied_as_it_is(fake: FakeDriver, cleanup: ExitStack) -> None:
    room = Room(cleanup, 4 * CHUNK)
    pinned = memory.allocate_pinned(room.size, "input")
    cleanup.callback(driver.call, "cuMemFreeHost", pinned)
    ctypes.memset(pinned, 7, room.size)
    room.copies.to_device(room.gpu, pinned, room.size, room.stream)
    ctypes.memset(pinned, 0, room.size)
    room.copies.to_host(pinned, room.gpu, room.size, room.stream)
    assert ctypes.string_at(pinned, room.size) == b"\7" * room.size
    assert fake.calls.count(TO) == fake.calls.count(FROM) == 1


@pytest.mark.parametrize("failing", ["cuEventSynchronize", TO, "cuEventRecord", FROM, "cuEventCreate", "cuCtxPushCurrent"])
def test_a_failure_in_a_thread_is_raised_by_the_call(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """A failure in any thread is raised in the caller. Later copies are right, and all objects are freed."""
    fake = FakeDriver()
    install(monkeypatch, fake)
    with ExitStack() as cleanup:
        room = Room(cleanup, 9 * CHUNK)
        if failing != "cuEventCreate":
            room.there_and_back(0)
        call, left = getattr(fake, f"do_{failing}"), [3]

        def fails(*arguments: object) -> object:
            left[0] -= 1
            if left[0]:
                return call(*arguments)
            return (719, None) if failing == "cuEventCreate" else 719

        with pytest.MonkeyPatch.context() as patch, pytest.raises(MachineError, match=failing):
            patch.setattr(fake, f"do_{failing}", fails)
            room.there_and_back(1)
        room.there_and_back(2)
    assert not fake.live and not fake.retained and not fake.pinned


def test_when_it_is_interrupted_no_thread_uses_the_callers_memory_any_more(
    fake: FakeDriver, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, before = Room(cleanup, 9 * CHUNK), threading.active_count()
    room.there_and_back(0)
    copy = ctypes.memmove

    def slow(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.1)
        return copy(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threaded_copies.ctypes, "memmove", slow)
        room.there_and_back(1)
    assert threading.active_count() == before
    room.there_and_back(2)


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_calls_from_the_host(fake: FakeDriver, tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "tiny.cgb"
    backend = opened(cuda_bundles.write(folder, b"an image"), folder, mode=mode)
    for seed, (number, key) in enumerate([*enumerate(KEYS)] * 2):
        values = inputs(key, seed)
        with backend.locked(None) as stream:
            results = backend.run(number, [values.buffer_info()[0]], None, stream)
        assert array("f", ctypes.string_at(results.addresses[0], 4 * len(values))) == expected(values)
    assert fake.calls.count("cuMemHostRegister") == 1
    backend.close()
    with pytest.raises(CgbundleError), backend.locked(None):
        pass
