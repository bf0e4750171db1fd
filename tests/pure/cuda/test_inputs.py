"""A launch reads inputs in the caller's memory, on a fake driver: parameters are set instead of copies. Answers are right for any
sequence of addresses. Other inputs are copied."""

from __future__ import annotations

import ctypes
import mmap
import random
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.cuda import graph_executor
from cgbundle.errors import CgbundleError
from cgbundle.format.schema import Alias, Manifest
from cgbundle.gpu import programs as binding
from cgbundle.gpu.backend import CudaBackend
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.manifest_text import describe_files
from cgcompile.bundle.recordings import MemcpyNode
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import INPUTS_AT, KEYS, RESULT, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.drivers.cuda_calls import opened
from tests.helpers.drivers.fake_driver import FakeDriver, install

BYTES = 4 * len(inputs(KEYS[0]))
SET, COPY = "cuGraphExecKernelNodeSetParams", "cuMemcpyDtoDAsync"


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return cuda_bundles.write(tmp_path / "tiny.cgb", b"an image"), tmp_path / "tiny.cgb"


class Caller:
    """Calls the first key with inputs in page-aligned memory, and counts the driver calls for its input."""

    def __init__(self, fake: FakeDriver, backend: CudaBackend) -> None:
        self.fake, self.backend = fake, backend
        self._pages = mmap.mmap(-1, 1 << 16)
        self.page = ctypes.addressof((ctypes.c_char * len(self._pages)).from_buffer(self._pages))
        ((self.target,), _) = backend.buffers(0)

    def put(self, at: int, seed: int) -> int:
        """Writes an input at `at` of the memory, and returns its address."""
        ctypes.memmove(self.page + at, inputs(KEYS[0], seed).tobytes(), BYTES)
        return self.page + at

    def __call__(self, address: int) -> tuple[int, int]:
        """Returns (parameters set, inputs copied) for a call whose answer is right."""
        values = array("f", ctypes.string_at(address, BYTES))
        before = len(self.fake.calls)
        with self.backend.locked(None) as stream:
            (output,) = self.backend.run(0, [address], 0, stream).addresses
        assert array("f", ctypes.string_at(output, BYTES)) == expected(values)
        driver_calls = self.fake.calls[before:]
        return driver_calls.count(SET), driver_calls.count(COPY) - 1  # one copy is a step of the program

    def from_host(self, seed: int) -> None:
        values = inputs(KEYS[0], seed)
        with self.backend.locked(None) as stream:
            results = self.backend.run(0, [values.buffer_info()[0]], None, stream)
        assert array("f", ctypes.string_at(results.addresses[0], BYTES)) == expected(values)


@pytest.fixture
def caller(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> Iterator[Caller]:
    calls = Caller(fake, opened(*bundle))
    yield calls
    calls.backend.close()


def test_what_is_aligned_is_read_where_it_lies(caller: Caller) -> None:
    one, other = caller.put(0, 1), caller.put(4096, 2)
    assert [caller(address) for address in (one, one, other, other, one)] == [(1, 0), (0, 0), (1, 0), (0, 0), (1, 0)]


def test_new_numbers_in_the_same_place_are_read(caller: Caller) -> None:
    caller(caller.put(0, 1))
    assert caller(caller.put(0, 2)) == (0, 0)


def test_what_is_not_aligned_is_copied(caller: Caller) -> None:
    one, odd = caller.put(0, 1), caller.put(4096 + 16, 2)
    assert [caller(address) for address in (odd, odd, one, odd, odd)] == [(0, 1), (0, 1), (1, 0), (1, 1), (0, 1)]


def test_the_static_buffer_is_read_as_it_is(caller: Caller) -> None:
    ctypes.memmove(caller.target, inputs(KEYS[0], 3).tobytes(), BYTES)
    assert caller(caller.target) == (0, 0)
    caller(caller.put(0, 1))
    assert caller(caller.target) == (1, 0)
    assert caller(caller.target) == (0, 0)


def test_an_input_of_the_host_comes_after_one_in_place(caller: Caller) -> None:
    for seed in range(2):
        caller(caller.put(0, seed))
        caller.from_host(seed + 5)


@pytest.mark.parametrize("memory", ["arena", "inputs"])
def test_what_a_launch_may_write_over_is_copied(caller: Caller, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "ALIGNMENT", 1)  # the fake driver's memory has any alignment
    caller(caller.put(0, 1))
    begin, _ = caller.backend._memories.range(memory)
    address = begin + (RESULT if memory == "arena" else 512)
    ctypes.memmove(address, inputs(KEYS[0], 4).tobytes(), BYTES)
    assert caller(address) == (1, 1)


def test_in_a_capture_it_is_copied(caller: Caller) -> None:
    address, fake = caller.put(0, 1), caller.fake
    caller(address)
    fake.capturing.add(64)
    with caller.backend.locked(64) as stream:
        (output,) = caller.backend.run(0, [address], 0, stream).addresses
    fake.capturing.clear()
    for seed in (6, 7):  # the caller's graph reads its captured tensor, also after other calls
        caller(caller.put(4096, seed))
        caller.put(0, seed)
        for run in fake.captured:
            run()
        assert array("f", ctypes.string_at(output, BYTES)) == expected(inputs(KEYS[0], seed))


def test_any_order(caller: Caller) -> None:
    rng = random.Random(0)
    for seed in range(60):
        way = rng.choice(("in place", "in place", "odd", "static", "host"))
        if way == "host":
            caller.from_host(seed)
        elif way == "static":
            ctypes.memmove(caller.target, inputs(KEYS[0], seed).tobytes(), BYTES)
            caller(caller.target)
        else:
            caller(caller.put(rng.choice((0, 4096, 8192)) + (way == "odd") * 8, seed))


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_too_many_readers_or_no_graph_copy(
    fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_executor, "READERS", 0)
    caller = Caller(fake, opened(*bundle, mode=mode))
    assert caller(caller.put(0, 1)) == (0, 1)
    caller.backend.close()


def test_a_failed_call_leaves_the_next_one_right(monkeypatch: pytest.MonkeyPatch, bundle: tuple[Manifest, Path]) -> None:
    counted = FakeDriver()
    install(monkeypatch, counted)
    caller = Caller(counted, opened(*bundle))
    addresses = [caller.put(0, 1), caller.put(4096, 2), caller.put(8192 + 8, 3)]
    first = len(counted.calls)
    for address in addresses:
        caller(address)
    failures = 0
    for number in range(first, len(counted.calls)):
        for address in addresses:
            counted.fail_at = len(counted.calls) + number - first
            try:
                caller(address)
            except CgbundleError:
                failures += 1
            counted.fail_at = -1
            for next_address in reversed(addresses):
                caller(next_address)
    assert failures > 3
    caller.backend.close()


def test_only_what_recordings_alone_read_is_in_place(bundle: tuple[Manifest, Path]) -> None:
    manifest, _ = bundle
    (program, _), reads = manifest.entries[0].programs, binding._inputs_are_read
    entry = manifest.entries[0]
    assert reads(program, entry)
    assert not reads(program, replace(entry, mutated_inputs=(0,)))
    assert not reads(program, replace(entry, aliases=(Alias(output=0, memory="inputs", index=0),)))
    assert not reads(replace(program, outputs=(0,)), entry)
    graph, copy = program.steps
    assert not reads(replace(program, steps=(graph, replace(copy, inputs=(0,)))), entry)


def test_a_recording_of_two_programs_is_not_told_of_ones_inputs(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    one, other = manifest.entries[0].programs
    twice = replace(other, steps=one.steps, values=one.values, arena=one.arena)
    caller = Caller(fake, opened(edited(manifest, programs=(one, twice)), folder))
    assert caller(caller.put(0, 1)) == (0, 1)
    caller.backend.close()


def test_a_recording_that_copies_an_input_itself_is_given_it_in_its_buffer(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    image = next(file.sha256 for file in manifest.files if file.path.startswith("kernels/"))
    recording = cuda_bundles.recording(image, KEYS[0])
    nodes = [
        replace(node, source=cuda_bundles.address(INPUTS_AT, 0)) if isinstance(node, MemcpyNode) else node
        for node in recording.nodes
    ]
    (folder / "graphs" / f"g0-{KEYS[0]}.bin").write_bytes(tables.encode(replace(recording, nodes=tuple(nodes))))
    backend = opened(replace(manifest, files=describe_files(str(folder))), folder)
    caller, before = Caller(fake, backend), len(fake.calls)
    with backend.locked(None) as stream:
        backend.run(0, [caller.put(0, 1)], 0, stream)
    assert SET not in fake.calls[before:] and fake.calls[before:].count(COPY) == 2
    backend.close()
