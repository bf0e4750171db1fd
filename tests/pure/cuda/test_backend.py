"""The CUDA backend on a fake driver: results are right and in order, and no object of the driver remains, whichever call fails."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.call.profile import Profile, step_names
from cgbundle.cuda import driver, kernels, lanes, libcuda, memory, upload
from cgbundle.errors import BundleError, CgbundleError, MachineError, OutOfMemory
from cgbundle.format.safetensors import Entry
from cgbundle.format.schema import Manifest, Weight
from cgbundle.format.table import Table
from cgbundle.gpu import device_bundle as shared
from cgbundle.gpu import step_times
from cgbundle.program.opening import MODES
from cgbundle.validate import contents, module_state
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import KEYS, expected, inputs
from tests.helpers.drivers.cuda_calls import allocate, call, opened, run
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return cuda_bundles.write(tmp_path / "tiny.cgb", b"an image"), tmp_path / "tiny.cgb"


@pytest.mark.parametrize("mode", MODES)
def test_replays_what_was_recorded(fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str) -> None:
    backend = opened(*bundle, mode=mode)
    for seed in range(2):
        for number, key in enumerate(KEYS):
            values = inputs(key, seed)
            assert call(backend, number, values) == expected(values)
    backend.close()
    assert fake.calls.count("cuModuleLoadData") == 1
    assert fake.calls.count("cuGraphInstantiate") == (2 if mode == "graph" else 0)


def test_a_run_is_one_launch(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    before = len(fake.calls)
    run(backend, 0, [None])
    assert fake.calls[before:] == ["cuCtxPushCurrent", "cuGraphLaunch", "cuMemcpyDtoDAsync", "cuCtxPopCurrent"]
    backend.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_graphs_are_built_at_load_or_at_the_first_call_of_their_key(
    fake: FakeDriver, bundle: tuple[Manifest, Path], lazy: bool
) -> None:
    manifest, folder = bundle
    calls = opened(manifest, folder, lazy=lazy)
    built = [fake.calls.count("cuGraphInstantiate")]
    for number in (1, 1, 0):
        values = inputs(KEYS[number])
        with calls.locked(None) as stream:
            (address,) = calls.run(number, [values.buffer_info()[0]], 0, stream).addresses
        built.append(fake.calls.count("cuGraphInstantiate"))
        assert array("f", ctypes.string_at(address, 4 * len(values))) == expected(values)
    assert built == ([0, 1, 1, 2] if lazy else [2, 2, 2, 2])
    calls.close()


@pytest.mark.parametrize("mode", MODES)
def test_poison_changes_nothing(fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str) -> None:
    manifest, folder = bundle
    backend = opened(manifest, folder, mode=mode, poison=0xA5)
    values = inputs(KEYS[0])
    assert call(backend, 0, values) == expected(values)
    backend.poison(0xFF)
    assert call(backend, 0, values) == expected(values)
    backend.close()


def test_poison_fills_undefined_bytes_only(bundle: tuple[Manifest, Path]) -> None:
    _, folder = bundle
    table = Table((folder / "graphs/g0-4.bin").read_bytes())
    plain = kernels.patch(table, (1 << 40, 2 << 40, 3 << 40, 4 << 40, 0), None).tobytes()
    poisoned = kernels.patch(table, (1 << 40, 2 << 40, 3 << 40, 4 << 40, 0), 0xA5).tobytes()
    assert [i for i in range(len(plain)) if plain[i] != poisoned[i]] == [20, 21, 22, 23]
    assert int.from_bytes(plain[0:8], "little") == (4 << 40) + cuda_bundles.RESULT
    assert int.from_bytes(plain[56:64], "little") == 3 << 40


def test_outputs_outlive_the_program(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    values = inputs(KEYS[0])
    (output,) = run(backend, 0, [(values.buffer_info()[0], False, 4 * len(values))])
    kept, dropped = backend.copy_out(output, 4 * len(values), None), allocate(backend, 100)
    del dropped
    backend.poison(0)
    backend.close()
    assert array("f", ctypes.string_at(kept.address, kept.bytes)) == expected(values)
    assert fake.retained == 1
    kept.free()
    kept.free()


@pytest.mark.parametrize("lazy", [False, True])
def test_steps_are_timed_by_events_while_a_profile_watches(fake: FakeDriver, bundle: tuple[Manifest, Path], lazy: bool) -> None:
    manifest, _ = bundle
    backend = opened(*bundle, lazy=lazy)
    profile = Profile("tiny", backend.watch)
    values = inputs(KEYS[0])
    with profile:
        assert call(backend, 0, values) == expected(values)
        assert call(backend, 0, values) == expected(values)
    live, calls = len(fake.live), len(fake.calls)
    assert call(backend, 0, values) == expected(values)
    assert "cuEventElapsedTime" in fake.calls[:calls] and "cuEventElapsedTime" not in fake.calls[calls:]
    names = step_names(manifest, manifest.entries[0], manifest.entries[0].programs[0])
    assert [span.name for span in profile.spans] == names * 2 and {span.track for span in profile.spans} == {"GPU"}
    (row, *_) = profile.rows()
    assert row.times == 2 and row.track == "GPU"
    with profile:
        call(backend, 0, values)
    assert len(fake.live) == live, "events are left"
    profile.__enter__()
    call(backend, 0, values)
    backend.close()
    profile.__exit__(None, None, None)
    assert len(profile.spans) == 4 * len(names)


def test_a_long_profile_keeps_few_events(fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "PENDING", 3)
    backend = opened(*bundle)
    values = inputs(KEYS[0])
    before = len(fake.live)
    with Profile("tiny", backend.watch) as profile:
        for _ in range(10):
            call(backend, 0, values)
            assert len(fake.live) <= before + 1 + 2 * 3
    assert len(profile.spans) == 10 * len(bundle[0].entries[0].programs[0].steps)
    backend.close()


def test_streams_are_put_in_order(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)

    def events(stream: int | None) -> list[str]:
        before = len(fake.calls)
        run(backend, 0, [None], stream)
        return [name for name in fake.calls[before:] if "Event" in name]

    assert events(None) == []
    assert events(0) == ["cuEventRecord", "cuStreamWaitEvent"], "the legacy stream lasts: marked when another comes"
    assert events(0) == []
    assert events(5) == ["cuEventRecord", "cuStreamWaitEvent", "cuEventRecord"], "the caller may destroy stream 5 after the call"
    assert events(5) == ["cuEventRecord"]
    assert events(0) == ["cuStreamWaitEvent"]
    assert events(None) == ["cuEventRecord", "cuStreamWaitEvent"]
    backend.close()


def test_a_closed_backend_refuses_and_closes_twice(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    backend.close()
    backend.close()
    with raises("program-closed"):
        run(backend, 0, [None])


@pytest.mark.parametrize("mode", MODES)
def test_whichever_call_fails_nothing_is_left(monkeypatch: pytest.MonkeyPatch, bundle: tuple[Manifest, Path], mode: str) -> None:
    monkeypatch.setattr(upload, "way", lambda size: upload.Way(1, 2, True))
    values = inputs(KEYS[0])

    def session(fake: FakeDriver) -> None:
        install(monkeypatch, fake)
        backend = opened(*bundle, mode=mode)
        try:
            call(backend, 0, values)
            kept = [backend.copy_out(run(backend, 1, [None])[0], 256, None)]
        finally:
            fake.fail_at = -1  # a close that fails may leave objects
            backend.close()
        kept[0].free()

    counted = FakeDriver()
    session(counted)
    failures = 0
    for number in range(len(counted.calls)):
        fake = FakeDriver()
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
        if not any(word in failed for word in give_back):
            assert not fake.live, failed
            assert fake.retained == 0, failed
    assert failures > 30


def test_an_interrupt_while_opening_leaves_nothing(
    fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module_state, "check_module_states", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(*bundle)


# --- the machine ----------------------------------------------------------------------------------------------


def test_without_a_driver(bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", "libcuda.no.such")
    install(monkeypatch, libcuda.Driver())
    with raises("wrong-machine", match=r"the bundle is for sm_90: this machine has no CUDA driver: libcuda\.no\.such: cannot open"):
        opened(*bundle)


def test_a_driver_without_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may lack newer functions. Here the C library replaces the driver, and has no function of it."""
    monkeypatch.setattr(libcuda, "LIBRARY", "libc.so.6")
    with raises("driver-too-old", match="has no cuGraphLaunch, which"):
        libcuda.Driver().cuGraphLaunch(1, 2)
    with pytest.raises(AttributeError):
        libcuda.Driver().cuNothing  # noqa: B018


@pytest.mark.parametrize(
    ("fake_driver", "number", "code", "message"),
    [
        (FakeDriver(devices=0), 0, "wrong-machine", "no usable GPU: cuInit gives CUDA_ERROR_NO_DEVICE"),
        (FakeDriver(), 1, "wrong-machine", "device 1: this machine has 1 visible GPU"),
        (FakeDriver(), -1, "wrong-machine", "device -1: this machine has 1 visible GPU"),
        (FakeDriver(arch=(8, 0)), 0, "wrong-architecture", r"for sm_90, device 0 \(Fake GPU\) is sm_80"),
        (FakeDriver(version=11080), 0, "driver-too-old", "for CUDA 12.0, this machine's is for 11.8"),
    ],
    ids=["no-gpu", "index", "negative", "arch", "driver"],
)
def test_the_wrong_machine(
    fake_driver: FakeDriver,
    number: int,
    code: str,
    message: str,
    bundle: tuple[Manifest, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, fake_driver)
    with raises(code, match=message):
        opened(*bundle, device=number)
    assert not fake_driver.live
    assert fake_driver.retained == 0


def test_the_suffix_of_an_architecture_is_no_other(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    opened(replace(manifest, target=replace(manifest.target, arch="sm_90a")), folder).close()


# --- the bundle -----------------------------------------------------------------------------------------------


def test_tables_are_checked_before_the_gpu_is_touched(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    small = replace(manifest, memories=(("weights", 1024), ("inputs", 1024), ("arena", 512)))
    with raises("relocation-invalid", match=r"graphs/g0-4.bin: nodes\[0\].relocations: .* memory arena, which has 512"):
        contents.check_tables(ArchiveOf(folder, small))
    assert not fake.calls


def test_an_image_that_is_not_there(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    for image in (folder / "kernels").iterdir():
        image.unlink()
    with raises("file-damaged", match=r"kernels/.*: missing"):
        opened(manifest, folder)


def test_an_image_that_is_cut_off_never_reaches_the_driver(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    """The driver does not know the length of an image, and would read past the end."""
    manifest, folder = bundle
    cubin = next((GOLDEN / "v1" / "state.cgb" / "kernels").iterdir()).read_bytes()
    (image,) = (folder / "kernels").iterdir()
    for cut in (cubin[: len(cubin) // 2], cubin[:64], b"\x50\xed\x55\xba" + bytes([255]) * 60):
        image.write_bytes(cut)
        with raises("image-invalid", match="^kernels/[0-9a-f]{64}: (cut off|not an ELF file)"):
            opened(manifest, folder)
        assert "cuModuleLoadData" not in fake.calls and not fake.live


def test_parameters_that_differ_from_the_images(
    fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "do_cuFuncGetParamInfo", lambda function, index: (0, 0, 8) if index == 0 else (1,), raising=False)
    with raises("table-invalid", match=r"the image takes parameters \[\(0, 8\)\]"):
        opened(*bundle)


def test_weights_that_end_early(fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, folder = bundle
    monkeypatch.setattr(shared, "listed", lambda bundle: {"weights.safetensors": [upload.Piece(0, 4096, 0)]})
    with raises("weights-invalid", match="ends too early"):
        opened(manifest, folder)


# --- the upload of weights ------------------------------------------------------------------------------------


def weight(name: str, tensor: str, offset: int) -> Weight:
    return Weight(name=name, tensor=tensor, dtype="uint8", shape=(), strides=(), memory="weights", offset=offset)


ENTRIES = {
    "a": Entry(dtype="uint8", shape=(256,), begin=1000, end=1256),
    "b": Entry(dtype="uint8", shape=(100,), begin=1256, end=1356),
    "c": Entry(dtype="uint8", shape=(10,), begin=1356, end=1366),
    "empty": Entry(dtype="uint8", shape=(0,), begin=1366, end=1366),
}


def test_adjacent_weights_are_one_piece() -> None:
    rows = [weight("w", "b", 256), weight("v", "a", 0), weight("tied", "a", 0), weight("x", "c", 512), weight("e", "empty", 768)]
    assert upload.pieces(rows, ENTRIES, 1024) == [upload.Piece(1000, 356, 0), upload.Piece(1356, 10, 512)]


def test_weights_must_exist_and_fit() -> None:
    with raises("weights-invalid", match="no tensor 'z', which weight 'w' names"):
        upload.pieces([weight("w", "z", 0)], ENTRIES, 1024)
    with raises("weights-invalid", match="256 bytes at 1000 of memory weights, which has 1024"):
        upload.pieces([weight("w", "a", 1000)], ENTRIES, 1024)


def test_chunks_cover_the_pieces_once() -> None:
    listed = [upload.Piece(10, 95, 0), upload.Piece(105, 3, 512), upload.Piece(400, 5, 768)]
    groups = upload.chunks(listed, 50)
    assert groups == [
        [upload.Piece(10, 40, 0)],
        [upload.Piece(50, 50, 40)],
        [upload.Piece(100, 5, 90), upload.Piece(105, 3, 512)],
        [upload.Piece(400, 5, 768)],
    ]
    assert [upload.place(group) for group in groups] == [(10, 40), (50, 50), (100, 8), (400, 5)]


def ways(monkeypatch: pytest.MonkeyPatch, readers: int, slots: int, chunk: int, lanes: int) -> upload.Way:
    """Returns settings of an upload with small chunks and lanes (reads by glibc's threads), as if the file were in the page
    cache."""
    monkeypatch.setattr(upload, "is_cached", lambda file: True)
    return upload.Way(readers, slots, True, chunk, lanes)


@pytest.mark.parametrize("lanes", [0, 1, 3, 40])
def test_many_small_chunks_by_several_threads(
    lanes: int, fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ways(monkeypatch, 3, 2, 64, lanes)
    _, folder = bundle
    size = (folder / "weights.safetensors").stat().st_size
    context = driver.Context(0)
    with context:
        base = memory.allocate(size, "test")
        with open(folder / "weights.safetensors", "rb") as file:
            upload.Upload(context, file.fileno(), [upload.Piece(0, size, 0)], base, how).wait()
        assert ctypes.string_at(base, size) == (folder / "weights.safetensors").read_bytes()
        driver.call("cuMemFree", base)
    context.release()


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("pinned", [True, False])
def test_where_memory_cannot_be_pinned_all_arrives(
    pinned: bool, lanes: int, fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are eight readers, and fewer slots than groups. Some groups have several tensors."""
    if not pinned:
        monkeypatch.setattr(fake, "cuMemHostRegister", lambda *arguments: 801, raising=False)
    _, folder = bundle
    data = (folder / "weights.safetensors").read_bytes()
    listed = [upload.Piece(at, 30, 2 * at) for at in range(0, len(data) - 30, 31)]
    context = driver.Context(0)
    with context:
        base = memory.allocate(2 * len(data), "test")
        with open(folder / "weights.safetensors", "rb") as file:
            upload.Upload(context, file.fileno(), listed, base, ways(monkeypatch, 8, 16, 64, lanes)).wait()
        for piece in listed:
            assert ctypes.string_at(base + piece.target, piece.size) == data[piece.begin : piece.begin + piece.size]
        driver.call("cuMemFree", base)
    context.release()


@pytest.mark.parametrize(("readers", "lanes"), [(1, 0), (4, 0), (1, 3)])
def test_a_file_that_ends_too_early_ends_the_upload(
    readers: int, lanes: int, fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = bundle
    size = (folder / "weights.safetensors").stat().st_size
    context = driver.Context(0)
    with context, open(folder / "weights.safetensors", "rb") as file:
        base = memory.allocate(4 * size, "test")
        way = ways(monkeypatch, readers, 2, 64, lanes)
        started = upload.Upload(context, file.fileno(), [upload.Piece(0, 3 * size, 0)], base, way, "tables.safetensors")
        for _ in range(2):
            with raises("weights-invalid", match="tables.safetensors: the file ends too early"):
                started.wait()
        driver.call("cuMemFree", base)
    context.release()


@pytest.mark.parametrize("lanes", [0, 4])
def test_an_upload_that_is_stopped_lets_go(
    lanes: int, fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = bundle
    size = (folder / "weights.safetensors").stat().st_size
    context = driver.Context(0)
    with context, open(folder / "weights.safetensors", "rb") as file:
        base = memory.allocate(size, "test")
        how, opened = ways(monkeypatch, 3, 4, 16, lanes), len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            started = upload.Upload(context, file.fileno(), [upload.Piece(0, size, 0)], base, how)
            started.stop()
            assert not any(thread.name == "cgbundle-upload" for thread in threading.enumerate())
            assert len(os.listdir("/proc/self/fd")) == opened
        driver.call("cuMemFree", base)
    context.release()


@pytest.mark.parametrize(("cached", "there"), [(False, True), (True, False)])
def test_lanes_are_for_the_page_cache_and_glibc(
    cached: bool, there: bool, fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "AsyncReads", None)  # must not be called
    how = ways(monkeypatch, 3, 2, 64, 2)
    monkeypatch.setattr(upload, "is_cached", lambda file: cached)
    monkeypatch.setattr(lanes, "available", lambda: there)
    _, folder = bundle
    data = (folder / "weights.safetensors").read_bytes()
    context = driver.Context(0)
    with context, open(folder / "weights.safetensors", "rb") as file:
        base = memory.allocate(len(data), "test")
        upload.Upload(context, file.fileno(), [upload.Piece(0, len(data), 0)], base, how).wait()
        assert ctypes.string_at(base, len(data)) == data
        driver.call("cuMemFree", base)
    context.release()


@pytest.mark.parametrize("size", [0, 1, 16 << 20, 17 << 20, 330 << 20, 1 << 30, 16 << 30])
def test_what_is_small_pays_for_no_threads_and_no_pinned_memory(size: int) -> None:
    how = upload.way(size)
    assert how.pinned == (how.readers > 1) == (size > 16 << 20)
    assert (how.slots * how.chunk <= 64 << 20 and how.slots > how.readers) or not how.pinned
    assert (how.lanes > 0) == (size >= 1 << 30)


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_not_in_the_page_cache_is_announced_and_read(
    cached: bool, fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda file, begin, size, advice: asked.append((begin, size)))
    if not cached:
        read = os.preadv

        def preadv(file: int, views: list[memoryview], at: int, flags: int = 0) -> int:
            if flags:
                raise BlockingIOError
            return read(file, views, at)

        monkeypatch.setattr("os.preadv", preadv)
    monkeypatch.setattr(upload, "AHEAD", 128)
    data = os.urandom(500)
    (tmp_path / "file").write_bytes(data)
    context = driver.Context(0)
    with context, open(tmp_path / "file", "rb") as file:
        base = memory.allocate(len(data), "test")
        upload.Upload(context, file.fileno(), [upload.Piece(20, 480, 0)], base, upload.Way(1, 2, True, 64)).wait()
        assert ctypes.string_at(base, 480) == data[20:]
        driver.call("cuMemFree", base)
    context.release()
    # the first group is read directly; every later group is announced to the kernel once, two groups before it is read
    assert asked == ([] if cached else [(64, 64), (128, 64), *[(at, 64) for at in range(192, 448, 64)], (448, 52)])


def test_the_disk_begins_to_read_the_first_weights(
    fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda file, begin, size, advice: asked.append((begin, size)))
    monkeypatch.setattr(upload, "STEP", 256)
    monkeypatch.setattr(upload, "FIRST", 384)
    manifest, folder = bundle
    pieces = upload.listed(ArchiveOf(folder, manifest))
    (first, *_) = pieces["weights.safetensors"]
    assert first.size > 384
    assert asked == [(first.begin, 256), (first.begin + 256, 128)]
