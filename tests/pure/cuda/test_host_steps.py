"""Programs of graphs, copies and host regions, on a driver that runs work only when a thread waits for it. The regions are Python
functions and their tensors ctypes arrays. tests/cpu runs real shared objects.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.cuda import kernels, upload
from cgbundle.errors import BundleError, CallError, CgbundleError, MachineError, OutOfMemory
from cgbundle.format.schema import Manifest, Program, Region, Step, Value
from cgbundle.gpu import host_steps as hoststeps
from cgbundle.program.opening import MODES
from cgbundle.validate.programs import check_lifetimes, check_order
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.drivers.cuda_calls import call, opened, run, synchronize
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.raising import raises
from tests.pure.cuda.fake_regions import ADD, DOUBLE, INT32, FakeTorch, Regions
from tests.pure.cuda.late_driver import LateDriver

FILES = (DOUBLE, ADD)
HOST_BYTES = 4096


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Regions]:
    registry = Regions()
    monkeypatch.setattr(hoststeps, "open_region", registry.open)
    monkeypatch.setattr(hoststeps, "libtorch", SimpleNamespace(load=registry.load, LibTorch=FakeTorch))
    yield registry
    assert not registry.torch.tensors, "tensors of a region were not given back"
    assert all(region.closed == 1 for region in registry.opened.values())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDriver]:
    driver = LateDriver()
    install(monkeypatch, driver)
    yield driver
    assert not driver.live and not driver.pinned
    assert driver.retained == 0


# --- the bundle -------------------------------------------------------------------------------------------------------


def program(key: int, base: Program) -> Program:
    """x -> graph -> 1 -> copy -> 2 -> double -> 3 -> copy -> 4 -> copy -> 5 -> add -> 6 -> copy -> 7."""

    def value(memory: str, offset: int) -> Value:
        return replace(base.values[0], memory=memory, offset=offset)

    def step(kind: str, source: int, region: int = 0) -> Step:
        return Step(kind=kind, region=region, file="", inputs=(source,), outputs=(source + 1,))

    places = (
        ("inputs", 0), ("arena", cuda_bundles.RESULT), ("host", 0), ("host", 1024), ("arena", cuda_bundles.OUTPUT), ("host", 2048),
        ("host", 3072), ("arena", cuda_bundles.OUTPUT + 512),
    )  # fmt: skip
    return replace(
        base,
        values=tuple([value(*place) for place in places]),
        outputs=(7,),
        steps=(
            base.steps[0], step("copy", 1), step("host", 2, 1), step("copy", 3), step("copy", 4), step("host", 5, 2),
            step("copy", 6),
        ),
    )  # fmt: skip


def mixed(manifest: Manifest) -> Manifest:
    """Returns the manifest of `cuda_bundles` with programs that contain host steps."""
    hosts = tuple(Region(name=file[5:-3], kind="host", reason="", file=file, constants=()) for file in FILES)
    return edited(
        manifest,
        target=replace(manifest.target, torch="2.13.0"),
        memories=(*manifest.memories, ("host", HOST_BYTES)),
        regions=(*manifest.regions, *hosts),
        programs=tuple([program(key, row) for key, row in zip(KEYS, manifest.entries[0].programs, strict=True)]),
    )


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    folder = tmp_path / "mixed.cgb"
    manifest = mixed(cuda_bundles.write(folder, b"an image"))
    for row in manifest.entries[0].programs:
        check_order(row, "p")
        check_lifetimes(row, "p")
    return manifest, folder


def answer(values: array[float]) -> array[float]:
    return array("f", [2 * x + 1 for x in expected(values)])


# --- replays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_mixed_program(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], mode: str) -> None:
    backend = opened(*bundle, mode=mode)
    for seed in range(3):
        for number, key in enumerate(KEYS):
            values = inputs(key, seed)
            assert call(backend, number, values) == answer(values)
    backend.close()
    assert regions.loads == ["2.13.0"]
    assert {name: len(region.seen) for name, region in regions.opened.items()} == dict.fromkeys(FILES, 6)


def test_steps_run_in_their_order_and_host_steps_wait_for_the_stream(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]
) -> None:
    backend = opened(*bundle)
    for region in regions.opened.values():
        region.calls = fake.calls
    before = len(fake.calls)
    run(backend, 0, [None])
    assert fake.calls[before:] == [
        "cuCtxPushCurrent",
        "cuGraphLaunch", "cuMemcpyDtoHAsync",
        "cuStreamSynchronize", FILES[0],
        "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
        "cuStreamSynchronize", FILES[1],
        "cuMemcpyHtoDAsync",
        "cuCtxPopCurrent",
    ]  # fmt: skip
    backend.close()


def test_calls_that_nobody_waits_for(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    """The host step of a call overwrites the buffer from which the previous call copies. It must first wait for these copies."""
    backend = opened(*bundle)
    kept = []
    for seed in range(3):
        values = inputs(KEYS[0], seed)
        (output,) = run(backend, 0, [(values.buffer_info()[0], False, 4 * len(values))])
        kept.append((backend.copy_out(output, 4 * len(values), None), answer(values)))
    synchronize(backend)
    for output, wanted in kept:
        assert array("f", ctypes.string_at(output.address, output.bytes)) == wanted
        output.free()
    backend.close()


def test_without_waiting_the_results_are_wrong(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that this driver detects a host step that does not wait."""
    backend = opened(*bundle)
    monkeypatch.setattr(hoststeps, "cu", SimpleNamespace(cuStreamSynchronize=lambda stream: (0,)))
    values = inputs(KEYS[0])
    assert call(backend, 0, values) != answer(values)
    backend.close()


def test_streams_take_turns_at_the_buffer(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    kept = []
    for seed, stream in enumerate((None, 5, 0, 5, 6, None)):
        values = inputs(KEYS[1], seed)
        (output,) = run(backend, 1, [(values.buffer_info()[0], False, 4 * len(values))], stream)
        kept.append((backend.copy_out(output, 4 * len(values), stream), answer(values)))
    synchronize(backend)
    for output, wanted in kept:
        assert array("f", ctypes.string_at(output.address, output.bytes)) == wanted
        output.free()
    backend.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_several_threads(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], on_device: bool) -> None:
    manifest, folder = bundle
    calls = opened(manifest, folder)
    wrong: list[int] = []

    def serve(seed: int) -> None:
        for turn in range(10):
            number = (seed + turn) % 2
            values = inputs(KEYS[number], seed + turn)
            with calls.locked(None) as stream:
                results = calls.run(number, [values.buffer_info()[0]], 0 if on_device else None, stream)
                if on_device:
                    fake.cuStreamSynchronize(stream)
                output = array("f", ctypes.string_at(results.addresses[0], 4 * len(values)))
            if output != answer(values):
                wrong.append(seed)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls.close()
    assert not wrong
    assert len(regions.opened[FILES[0]].seen) == 40


def test_a_region_is_loaded_when_a_program_that_needs_it_is(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]
) -> None:
    manifest, folder = bundle
    first = replace(manifest.entries[0].programs[0], steps=manifest.entries[0].programs[0].steps[:4], outputs=(4,))
    calls = opened(edited(manifest, programs=(first, manifest.entries[0].programs[1])), folder, lazy=True)
    loaded = [sorted(regions.opened)]
    for number in (0, 1):
        values = inputs(KEYS[number])
        with calls.locked(None) as stream:
            calls.run(number, [values.buffer_info()[0]], None, stream)
        loaded.append(sorted(regions.opened))
    calls.close()
    assert loaded == [[], [FILES[0]], sorted(FILES)]


# --- the buffer -------------------------------------------------------------------------------------------------------


def test_one_pinned_buffer_from_open_to_close(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    assert list(fake.pinned.values()) == [HOST_BYTES]
    (start,) = fake.pinned
    for seed in range(2):
        numbers = inputs(KEYS[0], seed)
        run(backend, 0, [(numbers.buffer_info()[0], False, 4 * len(numbers))])
    assert regions.opened[FILES[0]].addresses == [start, start]
    assert regions.opened[FILES[1]].addresses == [start + 2048] * 2
    assert list(fake.pinned) == [start]
    backend.close()  # copies still run: the fake driver raises an error unless close waits for them
    assert not fake.pinned


def test_graphs_get_no_address_of_the_hosts(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bases: list[Sequence[int]] = []
    patch = kernels.patch
    monkeypatch.setattr(kernels, "patch", lambda table, starts, poison: (bases.append(starts), patch(table, starts, poison))[1])
    backend = opened(*bundle)
    assert [starts[-1] for starts in bases] == [0, 0]
    backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_poison_fills_arena_and_buffer_and_changes_nothing(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], mode: str
) -> None:
    manifest, folder = bundle
    backend = opened(manifest, folder, mode=mode, poison=0xA5)
    (start,) = [address for address, size in fake.pinned.items() if size == HOST_BYTES]
    assert ctypes.string_at(start, HOST_BYTES) == b"\xa5" * HOST_BYTES
    values = inputs(KEYS[0])
    assert call(backend, 0, values) == answer(values)
    (output,) = run(backend, 0, [(values.buffer_info()[0], False, 4 * len(values))])
    kept = backend.copy_out(output, 4 * len(values), None)
    backend.poison(0xFF)  # copies of this call must read the buffer before
    assert ctypes.string_at(start, HOST_BYTES) == b"\xff" * HOST_BYTES
    assert call(backend, 0, values) == answer(values)
    assert array("f", ctypes.string_at(kept.address, kept.bytes)) == answer(values)
    kept.free()
    backend.close()


def test_a_value_without_elements_is_not_copied(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    last = manifest.entries[0].programs[0]
    empty = tuple([replace(value, shape=(0, FLOATS)) if index > 1 else value for index, value in enumerate(last.values)])
    steps = (last.steps[0], *last.steps[2:])
    backend = opened(edited(manifest, programs=(replace(last, values=empty, steps=steps),)), folder)
    before = len(fake.calls)
    run(backend, 0, [None])
    assert not [name for name in fake.calls[before:] if "Memcpy" in name]
    backend.close()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (4, 8)}, r"expected float32 \[4, 16\] with strides \[16, 1\], got \[4, 8\] with strides \[16, 1\]"),
        ({"strides": (1, 4)}, r"expected float32 \[4, 16\] with strides \[16, 1\], got \[4, 16\] with strides \[1, 4\]"),
        ({"dtype": INT32}, r"expected float32 .*, got \[4, 16\] with strides \[16, 1\] and another dtype"),
    ],
)  # fmt: skip
def test_a_tensor_of_another_layout(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], changes: dict[str, Any], message: str
) -> None:
    backend = opened(*bundle)
    values = inputs(KEYS[0])
    regions.opened[FILES[1]].changes = changes
    with raises("library-refused", match=f"^{FILES[1]}: an output: {message}") as caught:
        call(backend, 0, values)
    assert caught.value.hint
    assert not regions.torch.tensors
    regions.opened[FILES[1]].changes = {}
    assert call(backend, 0, values) == answer(values)
    backend.close()


def test_strides_of_single_rows_do_not_matter(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    last = manifest.entries[0].programs[0]
    thin = tuple([replace(value, shape=(1, FLOATS)) if index else value for index, value in enumerate(last.values)])
    backend = opened(edited(manifest, programs=(replace(last, values=thin),)), folder)
    regions.opened[FILES[1]].changes = {"strides": (99, 1)}
    numbers = inputs(KEYS[0])
    assert call(backend, 0, numbers)[:FLOATS] == answer(numbers)[:FLOATS]
    backend.close()


def test_a_region_that_fails(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    values = inputs(KEYS[0])
    regions.opened[FILES[1]].error = CallError("operation-refused", f"{FILES[1]}: index out of range")
    with raises("operation-refused", match="index out of range"):
        call(backend, 0, values)
    regions.opened[FILES[1]].error = None
    assert call(backend, 0, values) == answer(values)
    backend.close()


def test_a_graph_that_faults_shows_before_the_host_step(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    fake.fail_at = len(fake.calls) + 3  # after cuCtxPushCurrent, cuGraphLaunch and cuMemcpyDtoHAsync
    with raises("driver-failed", match=r"^cuStreamSynchronize \(before host/double.so\): CUDA_ERROR_LAUNCH_FAILED"):
        run(backend, 0, [None])
    assert not regions.opened[FILES[0]].seen
    backend.close()


def test_no_pinned_memory_left(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "do_cuMemHostAlloc", lambda size, flags: (2,), raising=False)
    with raises("out-of-memory", match=r"^memory host: needs 4,096 bytes of pinned memory, which the system does not give"):
        opened(*bundle)
    assert not regions.loads


def test_a_processor_that_lacks_something(fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    with raises("wrong-machine", match="this processor lacks avx1024"):
        opened(replace(manifest, target=replace(manifest.target, features=("avx1024",))), folder)
    assert not fake.calls


def test_torch_that_is_missing(
    fake: LateDriver, regions: Regions, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(needed: str, threads: int | None = None) -> None:
        raise MachineError("library-missing", "libtorch_cpu.so not found")

    monkeypatch.setattr(hoststeps.libtorch, "load", load)
    with raises("library-missing"):
        opened(*bundle)
    manifest, folder = bundle
    plain = cuda_bundles.program(KEYS[0])
    graphs = edited(manifest, regions=manifest.regions[:1], programs=(plain,), memories=manifest.memories[:4])
    backend = opened(graphs, folder)  # a bundle without host regions needs no libtorch
    values = inputs(KEYS[0])
    assert call(backend, 0, values) == expected(values)
    assert not fake.pinned
    backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_whichever_call_fails_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, bundle: tuple[Manifest, Path], regions: Regions, mode: str
) -> None:
    monkeypatch.setattr(upload, "way", lambda size: upload.Way(1, 2, True))
    values = inputs(KEYS[0])

    def session(fake: FakeDriver) -> None:
        install(monkeypatch, fake)
        backend = opened(*bundle, mode=mode, poison=0x11)
        try:
            call(backend, 0, values)
            backend.poison(0x22)
        finally:
            fake.fail_at = -1  # a close that fails may leave objects
            backend.close()

    counted = LateDriver()
    session(counted)
    failures = 0
    for number in range(len(counted.calls)):
        fake = LateDriver()
        fake.fail_at = number
        fake.error = 2 if number % 2 else 719
        try:
            session(fake)
        except CgbundleError as error:
            failures += 1
            assert isinstance(error, (MachineError, OutOfMemory, MachineError, BundleError))
        give_back = (
            "Destroy",
            "Free",
            "Unregister",
            "Unload",
            "Release",
            "PopCurrent",
        )  # the failed call should have freed these
        failed = fake.calls[number] if number < len(fake.calls) else ""
        assert not regions.torch.tensors, failed
        if not any(word in failed for word in give_back):
            assert not fake.live and not fake.pinned, failed
            assert fake.retained == 0, failed
    assert failures > 30
