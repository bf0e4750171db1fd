"""A call like an earlier one goes directly to its replay, with the same answers, errors and guards. Other calls take the full
path."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cgbundle.call import outputs as direct
from cgbundle.call.outputs import Known, KnownCalls
from cgbundle.errors import CallError, MachineError
from cgbundle.format.schema import Dimension, TensorSpec
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import Program
from cgbundle.tensors.tensor import DLPack, Tensor, from_bytes
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import POSITIONAL
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.raising import raises


@pytest.fixture
def program(fake: FakeDriver, tmp_path: Path) -> Iterator[Program]:
    """Yields a program that computes y = 3 (1 + x) + ..., as in `cuda_bundles`."""
    folder = tmp_path / "tiny.cgb"
    manifest = edited(
        cuda_bundles.write(folder, b"an image"),
        dimensions=(Dimension(name="batch", sizes=KEYS, pad="no", chunk=False, reason="it is small"),),
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", FLOATS), order=(0, 1)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", FLOATS), order=(0, 1)),),
        call={"call": [["x", {"tensor": 0}]]},
        parameters=(POSITIONAL,),
        result={"tensor": 0},
    )
    with Program(manifest, CudaBackend(ArchiveOf(folder, manifest), lazy=False), "pad", "view") as loaded_program:
        yield loaded_program


def on_gpu(key: int, seed: int, strides: tuple[int, int] = (FLOATS, 1)) -> Tensor:
    value = from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))
    return Tensor(value.address, value.dtype, value.shape, strides, value, 0)


def test_the_answers_are_those_of_a_first_call(program: Program) -> None:
    for seed, key in enumerate((*KEYS, *reversed(KEYS), *KEYS)):
        view = program(on_gpu(key, seed))
        assert array("f", ctypes.string_at(view.tensor.address, 4 * key * FLOATS)) == expected(inputs(key, seed))
        assert view.shape == (key, FLOATS)
    assert len(program._known) == len(KEYS)


def test_it_is_a_copy_and_a_launch(program: Program, fake: FakeDriver) -> None:
    value = on_gpu(KEYS[0], 0)
    program.replay([value])
    before = len(fake.calls)
    program.replay([value])
    driver_calls = [name for name in fake.calls[before:] if not name.startswith("cuCtx")]
    assert sorted(set(driver_calls)) == ["cuGraphLaunch", "cuMemcpyDtoDAsync"] and driver_calls.count("cuGraphLaunch") == 1


def test_different_calls_take_the_full_path(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.replay([on_gpu(KEYS[0], 0)])
    monkeypatch.setattr(KnownCalls, "add", remembered)
    with raises("input-dtype"):
        program.replay([Tensor(1 << 20, "int32", (KEYS[0], FLOATS), (FLOATS, 1), None, 0)])
    with raises("input-device"):
        program.replay([Tensor(1 << 20, "float32", (KEYS[0], FLOATS), (FLOATS, 1), None, 1)])
    with raises("input-shape"):
        program.replay([Tensor(1 << 20, "float32", (KEYS[0], FLOATS + 1), (FLOATS + 1, 1), None, 0)])
    with raises("input-kind", match="input 'x'"):
        program.replay([7])
    with raises("input-structure"):
        program.replay([])
    transposed = on_gpu(KEYS[0], 1, (1, KEYS[0]))
    host = from_bytes(inputs(KEYS[0], 1).tobytes(), "float32", (KEYS[0], FLOATS))
    with raises("input-device", match="laid out as recorded"):
        program.replay([transposed])
    program.replay([host])
    with pytest.raises(AssertionError, match="remembered"):
        program.replay([on_gpu(KEYS[1], 1)])


def remembered(*arguments: Any) -> None:
    raise AssertionError("remembered")


def test_views_are_guarded(program: Program) -> None:
    value = on_gpu(KEYS[0], 0)
    first, second = program.replay([value]), program.replay([value])
    third = program.replay([value])
    for view in (*first, *second):
        with raises("stale-view"):
            view.tensor  # noqa: B018
    assert third[0].tensor.address
    program.close()
    with raises("program-closed"):
        program.replay([value])
    with raises("stale-view"):
        third[0].tensor  # noqa: B018
    assert not len(program._known)


def test_a_driver_that_fails_lets_go_of_everything(program: Program, fake: FakeDriver) -> None:
    value = on_gpu(KEYS[0], 0)
    program.replay([value])
    start = len(fake.calls)
    program.replay([value])
    for number in range(len(fake.calls) - start):
        fake.fail_at = len(fake.calls) + number
        with pytest.raises(MachineError):
            program.replay([value])
        if fake.calls[fake.fail_at] == "cuCtxPopCurrent":
            fake._current.stack.pop()  # the failed pop has left the context on the stack
        fake.fail_at = -1
        assert not fake._current.stack
        program.replay([value])


def test_only_so_many_are_remembered(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "KEPT", 1)
    for key in (*KEYS, *KEYS):
        program.replay([on_gpu(key, 0)])
        assert len(program._known) == 1


def test_another_threads_session_is_busy(program: Program) -> None:
    session = program.session()
    value = on_gpu(KEYS[0], 0)
    session.replay([value])
    errors: list[CallError] = []

    def other() -> None:
        try:
            session.replay([value])
        except CallError as error:
            errors.append(error)

    with session._backend.locked(None):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [error.code for error in errors] == ["session-busy"]
    session.close()


def test_copies_are_the_drivers_where_the_library_gives_the_memory(
    program: Program, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the caller's library allocates the output, as torch does, the driver copies. Here the runtime's own library gets another
    name."""
    monkeypatch.setattr(DLPack, "name", "another")
    monkeypatch.setattr(program, "_views", False)
    monkeypatch.setattr(program._outputs, "_views", False)
    copies, tensors, refused = [], [], []

    def copy(library: DLPack, value: Tensor) -> Tensor:
        copies.append(value)
        return from_bytes(ctypes.string_at(value.address, 4 * value.shape[0] * FLOATS), value.dtype, value.shape)

    def empty_like(library: DLPack, value: Tensor) -> tuple[Tensor, int] | None:
        if refused:
            return None
        fresh = ctypes.create_string_buffer(4 * value.shape[0] * FLOATS)
        tensors.append(Tensor(ctypes.addressof(fresh), value.dtype, value.shape, value.strides, fresh, 0))
        return tensors[-1], tensors[-1].address

    monkeypatch.setattr(DLPack, "copy", copy)
    monkeypatch.setattr(DLPack, "empty_like", empty_like)
    for seed, key in enumerate((*KEYS, *KEYS, *reversed(KEYS))):
        output = program(on_gpu(key, seed))
        assert array("f", ctypes.string_at(output.address, 4 * key * FLOATS)) == expected(inputs(key, seed))
        assert output.shape == (key, FLOATS)
    assert len(copies) == len(KEYS) and len(tensors) == 2 * len(KEYS)
    refused.append(True)
    program(on_gpu(KEYS[0], 0))
    assert len(copies) == len(KEYS) + 1


def test_few_known_calls_are_kept_for_one_shape() -> None:
    calls, value = KnownCalls(), Tensor(1 << 20, "float32", (4,), (1,), None, 0)
    chosen = [0]

    def known(number: int) -> Known:
        return Known(lambda tensors: ([number], None) if chosen[0] == number else None, lambda addresses, views: [number])

    for number in range(3 * direct.LIKE):
        chosen[0] = number
        calls.add([value], known(number))
        assert calls.last is not None and calls.last.replay([], ()) == [number]
    assert len(calls) == direct.LIKE and calls.find([value]) is not None
    chosen[0] = 0  # the first call is no longer kept
    assert calls.find([value]) is None
    calls.add([value], known(-1))  # this `known` never matches, like that of a call with other properties
    assert len(calls) == direct.LIKE and calls.find([]) is None
