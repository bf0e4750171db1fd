"""Sessions, state, seeds and static inputs of a program for a GPU, on a fake driver."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from array import array
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest

from cgbundle.errors import CgbundleError
from cgbundle.format.schema import Manifest
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import Program
from cgbundle.tensors.tensor import Tensor, from_bytes
from cgbundle.validate import contents, module_state
from cgbundle.validate.manifest import check_manifest
from cgbundle.validate.module_state import Address, ModuleState, Relocation
from tests.helpers.bundles import state_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, INPUTS_AT, KEYS, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.state_bundles import FIRST
from tests.helpers.drivers.cuda_calls import GRANULARITY, planned
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.raising import raises


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return state_bundles.write(tmp_path / "tiny.cgb"), tmp_path / "tiny.cgb"


def opened(bundle: tuple[Manifest, Path], outputs: str = "copy", *, lazy: bool = False) -> Program:
    manifest, folder = bundle
    return Program(manifest, CudaBackend(ArchiveOf(folder, manifest), 0, "graph", lazy=lazy), "pad", outputs)


def batch(key: int, seed: int = 0) -> Tensor:
    return from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))


def on_gpu(value: Tensor) -> Tensor:
    """Returns the same memory as a tensor on the GPU; the fake driver's GPU memory is host memory."""
    return Tensor(value.address, value.dtype, value.shape, value.strides, value, 0)


def numbers(tensor: Tensor) -> list[float]:
    """Returns the elements of a dense tensor, on the CPU or the GPU."""
    count = 1
    for size in tensor.shape:
        count *= size
    return array("f", ctypes.string_at(tensor.address, 4 * count)).tolist()


def grown(first: list[float], *calls: Tensor) -> list[float]:
    return [sum(column) for column in zip(first, *[numbers(call)[:FLOATS] for call in calls], strict=True)]


def test_the_bundle_is_sound(bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    contents.check_tables(ArchiveOf(folder, manifest))
    with raises("file-damaged", match=r"exam.safetensors: the manifest needs it"):  # it has no self-test: the last check
        check_manifest(manifest)


# --- sessions ------------------------------------------------------------------------------------------------------


def test_sessions_share_weights_and_kernels_and_nothing_else(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program:
        program(batch(4))
        before = {name: fake.calls.count(name) for name in ("cuModuleLoadData", "cuDevicePrimaryCtxRetain", "cuStreamCreate")}
        first = set(fake.live)
        with program.session() as session, program.session() as other:
            assert type(session) is type(program) and session.int_keys == program.int_keys
            added = sorted(len(fake.live[at]) - 256 for at in fake.live.keys() - first if isinstance(fake.live[at], ctypes.Array))
            memories = {"state": 1024, "inputs": 1024, "arena": 4096}
            assert added == sorted([*memories.values()] * 2) and program.session_memory == session.session_memory
            assert program.session_memory == memories | {"code": len(b"an image")}, "the image with a variable, loaded once more"
            for handle, seeds in ((session, (1, 2)), (other, (3,))):
                for seed in seeds:
                    outputs = handle(batch(8, seed))
                    assert numbers(outputs["y"]) == list(expected(inputs(8, seed)))
            assert session.state["total"].tolist() == grown(FIRST, batch(8, 1), batch(8, 2))
            assert other.state["total"].tolist() == grown(FIRST, batch(8, 3))
            assert program.state["total"].tolist() == grown(FIRST, batch(4))
            places = [handle.state.view("total").address for handle in (program, session, other)]
            assert len(set(places)) == 3
            again = {name: fake.calls.count(name) for name in before}
            assert again == before | {"cuStreamCreate": before["cuStreamCreate"] + 2, "cuModuleLoadData": 3}
        assert set(fake.live) >= first
        left = [address for address in fake.live.keys() - first if isinstance(fake.live[address], ctypes.Array)]
        assert left == [], "a session gives its memory back"
        program(batch(4))


def test_a_streams_place_is_taken_by_the_next_session(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program:
        for _ in range(5):
            with program.session() as session:
                session(batch(4))
        assert fake.calls.count("cuStreamCreate") == 3, "one of the program, one of the sessions, one that brought the weights"


def test_closing_what_was_loaded_closes_its_sessions(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    program = opened(bundle)
    session = program.session()
    sibling = session.session()
    sibling.close()
    program.close()
    for handle in (program, session, sibling):
        for use in (
            lambda p=handle: p(batch(4)), lambda p=handle: p.state["total"], lambda p=handle: p.state.view("total"),
            lambda p=handle: p.reset(), lambda p=handle: p.buffers((4,)), lambda p=handle: p.session(),
            lambda p=handle: p.seed(1),
        ):  # fmt: skip
            with raises("program-closed", match="program 'tiny' was closed"):
                use()
    session.close()
    program.close()


def test_a_session_outlives_a_program_that_is_forgotten_and_is_collected_when_it_is(
    fake: FakeDriver, bundle: tuple[Manifest, Path]
) -> None:
    program = opened(bundle)
    session = program.session()
    forgotten = program.session()
    alive = weakref.ref(forgotten)
    before = len(fake.live)
    del forgotten
    gc.collect()
    assert alive() is None and len(fake.live) < before
    del program
    gc.collect()
    assert numbers(session(batch(4))["y"]) == list(expected(inputs(4)))
    session.close()
    assert fake.live, "the weights are the loaded program's, which the session kept"
    del session
    gc.collect()


def test_whichever_call_fails_a_session_leaves_nothing_and_disturbs_none(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program:
        program.session().close()
        start = len(fake.calls)
        session = program.session()
        count, failures = len(fake.calls) - start, 0
        session.close()
        live = {at for at, thing in fake.live.items() if thing != "stream"}
        for number in range(count):
            place = fake.fail_at = len(fake.calls) + number
            try:
                new_session = program.session()
            except CgbundleError:
                failures += 1
            else:
                fake.fail_at = -1
                new_session.close()
            fake.fail_at = -1
            name = fake.calls[place]
            left = {at for at, thing in fake.live.items() if thing != "stream"} - live
            assert not left or "Destroy" in name, name
            for at in left:  # only the failed call could have freed these
                del fake.live[at]
            assert numbers(program(batch(4, number))["y"]) == list(expected(inputs(4, number)))
        assert failures > 10


def test_two_threads_in_one_session_raise_and_spoil_nothing(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = fake.do_cuMemcpyDtoHAsync
    outputs: list[Any] = []
    with opened(bundle) as program, program.session() as session:

        def slow(*arguments: Any) -> None:
            if threading.current_thread().name == "first":
                inside.set()
                fake._lock.release()
                assert go_on.wait(60)
                fake._lock.acquire()
            real(*arguments)

        fake.do_cuMemcpyDtoHAsync = slow  # type: ignore[method-assign]
        first = threading.Thread(target=lambda: outputs.append(session(batch(4, 1))), name="first")
        first.start()
        assert inside.wait(60)
        uses = (lambda: session(batch(4)), lambda: session.state["total"], session.reset, lambda: session.buffers((4,)))
        for use in uses:
            with raises(
                "session-busy", match="a session of program 'tiny' is in use by thread 'first', and thread 'Main"
            ) as caught:
                use()
            assert "program.session()" in caught.value.hint
        assert numbers(program(batch(8))["y"]) == list(expected(inputs(8))), "other sessions go on"
        closer = threading.Thread(target=session.close)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive(), "close waits"
        go_on.set()
        first.join(60)
        closer.join(60)
        assert numbers(outputs[0]["y"]) == list(expected(inputs(4, 1)))


def test_eight_sessions_in_eight_threads(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    wrong: list[Any] = []

    def work(session: Program, seed: int) -> None:
        calls = []
        for number in range(10):
            key = KEYS[(seed + number) % 2]
            calls.append(batch(key, seed + number))
            if numbers(session(calls[-1])["y"]) != list(expected(inputs(key, seed + number))):
                wrong.append((seed, number))
        if session.state["total"].tolist() != grown(FIRST, *calls):
            wrong.append(seed)

    with opened(bundle, lazy=True) as program:
        sessions = [program.session() for _ in range(8)]
        threads = [threading.Thread(target=work, args=(session, 10 * seed)) for seed, session in enumerate(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert wrong == []
        assert program.state["total"].tolist() == FIRST


def test_variables_of_kernels_that_point_into_a_sessions_memory_are_its_own(
    fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = bundle
    image = next(file.sha256 for file in manifest.files if file.path.startswith("kernels/"))
    word = (Relocation(at=0, target=Address(memory=INPUTS_AT, offset=0)),)
    pointing = (ModuleState(image=image, symbol="table", contents=bytes(8), relocations=word),)
    monkeypatch.setattr(module_state, "states", lambda bundle: pointing)
    with opened(bundle) as program:
        for _ in range(2):
            with program.session() as session:
                session(batch(4, 5))
        assert fake.calls.count("cuModuleLoadData") == 3 == fake.calls.count("cuModuleUnload") + 1


def test_images_without_variables_that_kernels_write_are_loaded_once(
    fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_state, "states", lambda bundle: ())
    with opened(bundle) as program, program.session(), program.session():
        assert fake.calls.count("cuModuleLoadData") == 1


def test_kernels_of_two_sessions_never_write_to_the_same_variable(
    fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.drivers import fake_driver

    added = fake_driver.KERNELS["add"]

    def counting(block: list[bytes], data: dict[str, Any]) -> None:
        """Runs `add`, and counts its launches in a variable of its image, which `combine` reads."""
        (count,) = unpack("<f", data["bias"].raw)
        data["bias"].raw = pack("<f", count + 1)
        added(block, data)

    monkeypatch.setitem(fake_driver.KERNELS, "add", counting)
    with opened(bundle) as program, program.session() as session, program.session() as other:
        outputs = [numbers(handle(batch(4))["y"]) for handle in (program, session, other, session)]
        assert outputs[0] == outputs[1] == outputs[2] == [value + 1 for value in expected(inputs(4))]
        assert outputs[3] == [value + 2 for value in outputs[1]], "two launches of its own later"


def test_the_memory_of_a_session_is_known_beforehand(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program, program.session() as session:
        assert session._backend._memories.sizes.items() <= program.session_memory.items()  # type: ignore[attr-defined]
        assert planned(program.session_memory) == 3 * GRANULARITY


# --- state ---------------------------------------------------------------------------------------------------------


def test_state_is_read_written_and_reset_in_order_with_calls(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program:
        state = program.state
        assert list(state) == ["total", "marks"] and len(state) == 2 and "total" in state and "random" not in state
        assert state["total"].tolist() == FIRST and state["marks"].tolist() == [0] * 8
        kept = state["total"]
        program(batch(4, 1))
        assert state["total"].tolist() == grown(FIRST, batch(4, 1)) and kept.tolist() == FIRST
        assert state["marks"].tolist() == [7] * 8
        fresh = [2.0 * number for number in range(FLOATS)]
        for value in (from_bytes(array("f", fresh).tobytes(), "float32", (FLOATS,)),):
            state["total"] = value
            assert state["total"].tolist() == fresh
            state["total"] = on_gpu(value)
            assert state["total"].tolist() == fresh
        view = state.view("total")
        assert view.device == 0 and numbers(view) == fresh
        program(batch(8, 2))
        assert numbers(view) == grown(fresh, batch(8, 2)) == state["total"].tolist()
        program.reset()
        assert state["total"].tolist() == FIRST and state["marks"].tolist() == [0] * 8


def test_arrays_of_any_layout_are_written_to_state(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    numpy = pytest.importorskip("numpy")
    with opened(bundle) as program:
        for value in (numpy.arange(32, dtype="float32")[::2], numpy.arange(16, dtype="float32")[::-1]):
            program.state["total"] = value
            assert program.state["total"].tolist() == value.tolist()
            assert numpy.from_dlpack(program.state["total"]).tolist() == value.tolist()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (from_bytes(bytes(128), "float64", (16,)), "state 'total': expected float32, got float64"),
        (from_bytes(bytes(60), "float32", (15,)), r"state 'total': expected shape \[16\], got \[15\]"),
        (
            Tensor(0, "float32", (16,), None, None, 1),
            "state 'total': expected a tensor on the CPU or CUDA device 0, got one on dev",
        ),
        (3.0, "state 'total': expected a NumPy array, a torch tensor or a DLPack tensor, got the float 3.0"),
    ],
)
def test_what_does_not_fit_a_state_is_refused(fake: FakeDriver, bundle: tuple[Manifest, Path], value: Any, words: str) -> None:
    with opened(bundle) as program:
        with raises("state-invalid", match=words) as caught:
            program.state["total"] = value
        assert "\n" not in str(caught.value)
        assert program.state["total"].tolist() == FIRST


def test_a_state_that_is_not_there_is_named_with_those_that_are(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    with opened(bundle) as program:
        for name in ("random", "x"):
            with raises("state-missing") as caught:
                program.state[name]
            assert str(caught.value) == f"program 'tiny' has no state {name!r}: it has 'total', 'marks'"
            assert isinstance(caught.value, KeyError) and program.state.get(name) is None
        with raises("state-missing", match=r"no state 'totl' \(did you mean total\?\): it has 'total', 'marks'"):
            program.state["totl"] = batch(4)
        assert "total float32 [16]" in repr(program.state)
    plain = edited(manifest, weights=manifest.weights[:3], aliases=(), random=None)
    program = Program(plain, CudaBackend(ArchiveOf(folder, plain), 0, "graph", lazy=False), "pad", "copy")
    assert dict(program.state) == {} and "none" in repr(program.state)
    with raises("state-missing", match="its model keeps none"):
        program.state["total"]
    with raises("state-missing", match="program 'tiny' has no seed: its model draws no random numbers"):
        program.seed(1)
    program.reset()
    program.close()


def test_state_of_zeros_costs_no_copy(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program:
        before = len(fake.calls)
        program.reset()
        copies = [name for name in fake.calls[before:] if "Memcpy" in name or "Memset" in name]
        assert copies == ["cuMemsetD8Async", "cuMemcpyHtoDAsync"]


def test_every_session_begins_with_the_bundles_state(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle) as program:
        program(batch(4))
        with program.session() as session:
            assert session.state["total"].tolist() == FIRST
            session.state["total"] = from_bytes(bytes(64), "float32", (16,))
            program.reset()
            assert session.state["total"].tolist() == [0.0] * 16


# --- random numbers ------------------------------------------------------------------------------------------------


def test_seeds(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    manifest, _ = bundle
    with opened(bundle) as program, program.session() as session:
        drawn = [unpack("<qq", handle.state_bytes(manifest.random)) for handle in (program, session)]
        assert drawn[0] != drawn[1] and all(0 <= seed < 1 << 63 and calls == 0 for seed, calls in drawn)
        for seed in (0, 5, (1 << 63) - 1):
            program.seed(seed)
            assert unpack("<qq", program.state_bytes(manifest.random)) == (seed, 0)
        program.reset()
        assert unpack("<qq", program.state_bytes(manifest.random)) == ((1 << 63) - 1, 0), "a reset leaves random numbers alone"
        assert unpack("<qq", session.state_bytes(manifest.random)) == drawn[1]
        for seed in (-1, 1 << 63):
            with pytest.raises(ValueError, match=rf"seed {seed}: expected an integer from 0 to 2\*\*63 - 1"):
                program.seed(seed)
        total = [row.name for row in manifest.weights].index("total")
        assert array("f", program.state_bytes(total)).tolist() == FIRST


# --- static inputs -------------------------------------------------------------------------------------------------


def test_a_call_with_the_static_buffers_copies_nothing_in(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    with opened(bundle, "view") as program, program.session() as session:
        for handle in (program, session):
            (x,) = handle.buffers((8,))
            assert (x.shape, x.dtype, x.device, x.contiguous) == ((8, FLOATS), "float32", 0, True)
            ctypes.memmove(x.address, inputs(8, 3).tobytes(), 512)
            handle(on_gpu(x))
            before = len(fake.calls)
            outputs = handle(x)
            called = fake.calls[before:]
            assert called == ["cuCtxPushCurrent", "cuGraphLaunch", "cuMemcpyDtoDAsync", "cuCtxPopCurrent"], "the copy is a step"
            assert numbers(outputs["y"].tensor) == list(expected(inputs(8, 3)))
        assert program.buffers((8,))[0].address != session.buffers((8,))[0].address
        assert program.buffers((8,))[0].address == program.buffers((4,))[0].address
        for key in ((5,), 8, (4, 4)):
            with raises("key-missing", match=r"expected a recorded int_key \(\(4,\), \(8,\)\), got "):
                program.buffers(key)  # type: ignore[arg-type]
