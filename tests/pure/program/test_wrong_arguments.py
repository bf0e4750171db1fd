"""Wrong arguments of every kind give a CgbundleError, a TypeError or a ValueError of one line. No object of the driver remains."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle.call.plan import plan
from cgbundle.cuda import graph_executor
from cgbundle.errors import CgbundleError
from cgbundle.tensors.capsules import Managed
from cgbundle.tensors.tensor import Tensor
from tests.helpers.drivers.failing_gpu import write
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.raising import raises
from tests.pure.program.test_program import LINE, double, numbers, program

BIG = 10**12


class Odd:
    """An object whose attributes all raise an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} of mine")

    def __repr__(self) -> str:
        raise RuntimeError("no text of mine")


def refusal(
    call: Callable[[], object], known: type[Exception] | tuple[type[Exception], ...] = (CgbundleError, TypeError, ValueError)
) -> str:
    """Returns the one-line message with which a call is refused."""
    with pytest.raises(known) as caught:
        call()
    text = str(caught.value)
    assert text and "\n" not in text and len(text) < 400
    return text


# --- load ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    install(monkeypatch, driver)
    return driver


@pytest.fixture
def path(tmp_path: Path) -> str:
    write(tmp_path / "tiny.cgb")
    return str(tmp_path / "tiny.cgb")


@pytest.mark.parametrize(
    "path", [5, None, 2.5, True, [], {}, Odd(), object(), b"x\0y", "x\0y", "a" * 5000, ""], ids=lambda value: type(value).__name__
)
def test_a_path_that_is_none(path: Any) -> None:
    refusal(lambda: cgbundle.load(path))


WRONG: dict[str, list[Any]] = {
    "device": ["x", -1, None, 2.5, 10**20, True, [0], Odd()],
    "devices": ["01", [-1], 5, [None], [0.5], [True], {0}, Odd(), [Odd()]],
    "replicas": ["yes", 1, None, Odd()],
    "cast": ["no", None, 5],
    "lazy": ["x", 5, 0],
    "mode": [5, None, "x", [], Odd()],
    "on_miss": [5, None, "x", []],
    "outputs": [None, {}, "x"],
    "check": [None, [], "x"],
    "weights": [None, 7, "x"],
    "key": [5, "x", b"1", [], [None], "0" * 63, Odd(), [[]]],
    "threads": ["2", 0, -1, 2.5, True, 10**9, []],
    "timeout": ["1", -5, 0, None, True, float("nan"), float("inf"), 10**30, Odd()],
    "rank": ["x", -1, 0, 2.5, True, Odd()],
    "rendezvous": [5, b"x", "x", Odd()],
}


@pytest.mark.parametrize("option", WRONG)
def test_an_option_of_a_value_that_it_does_not_have(fake: FakeDriver, path: str, option: str) -> None:
    for value in WRONG[option]:
        assert option in refusal(lambda value=value: cgbundle.load(path, **{option: value}))  # type: ignore[misc]
    assert not fake.live and fake.retained == 0


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": True, "rank": 3, "timeout": -5},
        {"replicas": True, "rank": 3, "rendezvous": "x"},
        {"rank": 0, "rendezvous": "x", "devices": [0]},
        {"rank": 1},
        {"rendezvous": "x"},
        {"device": 1, "devices": [0, 1]},
        {"replicas": True, "devices": [0, 0]},
        {"replicas": True, "devices": []},
    ],
)
def test_options_that_contradict_each_other(fake: FakeDriver, path: str, options: dict[str, Any]) -> None:
    refusal(lambda: cgbundle.load(path, **options), ValueError)
    assert not fake.live and fake.retained == 0


@pytest.mark.parametrize("replicas", [False, True])
def test_nothing_is_left_where_a_program_cannot_be_made(
    fake: FakeDriver, path: str, monkeypatch: pytest.MonkeyPatch, replicas: bool
) -> None:
    def failing(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("of a constructor")

    monkeypatch.setattr("cgbundle.program.program.Sessions", failing)
    with pytest.raises(RuntimeError, match="of a constructor"):
        cgbundle.load(path, replicas=replicas)  # type: ignore[call-overload]
    assert not fake.live and fake.retained == 0


def test_nothing_is_left_where_a_graph_cannot_be_made_ready(fake: FakeDriver, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        raise RuntimeError("of a constructor")

    monkeypatch.setattr(graph_executor._Build, "readers", failing)
    with pytest.raises(RuntimeError, match="of a constructor"):
        cgbundle.load(path)
    assert not fake.live and fake.retained == 0


# --- a call --------------------------------------------------------------------------------------------------------------


def test_what_is_no_tensor() -> None:
    run, _ = program(LINE, double)
    good = numbers((2, 3))
    for value in (
        5,
        None,
        "x",
        b"1",
        [],
        [[0.0] * 3] * 2,
        {},
        object(),
        Odd(),
        float("nan"),
        type,
        1 + 2j,
        memoryview(b"12"),
        (good,),
    ):
        refusal(lambda value=value: run(value), CgbundleError)  # type: ignore[misc]
    for call in (
        lambda: run(),
        lambda: run(good, good),
        lambda: run(y=good),
        lambda: run(good, x=good),
        lambda: run["none"],
        lambda: run[5],
    ):
        refusal(call, CgbundleError)  # type: ignore[arg-type]
    for key in (5, None, "x", (), (3,), [2]):
        refusal(lambda key=key: run.warmup(key))  # type: ignore[misc]
    assert run(good)[0].tolist()


@pytest.mark.parametrize(
    "parts",
    [
        (None, "float32", (2, 3), None), ("a", "float32", (2, 3), None), (0, "float32", (2, 3), None),
        (-8, "float32", (2, 3), None), (64, "float99", (2, 3), None), (64, 5, (2, 3), None), (64, "float32", (2, -3), None),
        (64, "float32", (2, 3), (1,)),
        (64, "float32", (2.5, 3), None), (64, "float32", (10**30, 3), None), (64, "float32", (2, 3), (1 << 62, 1)),
    ],
)  # fmt: skip
def test_a_tensor_of_ours_that_is_none(parts: tuple[Any, ...]) -> None:
    run, _ = program(LINE, double)
    refusal(lambda: run(Tensor(*parts, None)), CgbundleError)


def test_a_broadcast_of_more_rows_than_a_plan_can_have() -> None:
    run, backend = program(LINE, double)
    row = numbers((1, 3))
    refusal(lambda: run(Tensor(row.address, "float32", (BIG, 3), (0, 1), row)), CgbundleError)
    assert not backend.calls
    with raises("key-missing"):
        plan(LINE.entries[0], [(BIG, 3)], "chunk")
    casting, _ = program(LINE, double, cast=True)
    half = Tensor(row.address, "float16", (BIG, 3), (0, 1), row)
    refusal(lambda: casting(half), CgbundleError)  # before it is cast


# --- DLPack --------------------------------------------------------------------------------------------------------------

_new = ctypes.pythonapi["PyCapsule_New"]
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Shared:
    """An object that claims to support DLPack."""

    def __init__(self, capsule: Any, device: Any = (1, 0)) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule() if callable(self.capsule) else self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device() if callable(self.device) else self.device


class Capsules:
    """Makes capsules over 16 numbers, which live as long as this object."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def capsule(self, name: bytes | None = b"dltensor", shape: Any = (2, 3), strides: Any = None, **fields: Any) -> Any:
        memory, managed = (ctypes.c_float * 16)(), Managed()
        axes = [None if sizes is None else (ctypes.c_int64 * len(sizes))(*sizes) for sizes in (shape, strides)]
        pointers = [ctypes.cast(axis, ctypes.POINTER(ctypes.c_int64)) if axis else None for axis in axes]
        plain = {
            "data": ctypes.addressof(memory), "device_type": 1, "ndim": 2, "code": 2, "bits": 32, "lanes": 1,
            "shape": pointers[0], "strides": pointers[1],
        }  # fmt: skip
        for field, value in (plain | fields).items():
            setattr(managed.tensor, field, value)
        self.kept += [memory, managed, axes, name]
        return _new(ctypes.addressof(managed), name, None)


MALFORMED: dict[str, dict[str, Any]] = {
    "another name": {"name": b"other"}, "used": {"name": b"used_dltensor"}, "versioned": {"name": b"dltensor_versioned"},
    "no name": {"name": None}, "no data": {"data": None}, "negative axes": {"ndim": -2}, "many axes": {"ndim": 1 << 30},
    "no shape": {"shape": None}, "a negative size": {"shape": (-2, 3)}, "a large size": {"shape": (1 << 62, 3)},
    "sizes beyond 64 bits": {"shape": (1 << 62, 1 << 62)}, "large strides": {"strides": (1 << 60, 1)},
    "strides below all memory": {"strides": (-(1 << 60), 1)}, "code": {"code": 9}, "bits": {"bits": 7}, "lanes": {"lanes": 4},
    "no lanes": {"lanes": 0}, "a large offset": {"byte_offset": 1 << 63}, "another device": {"device_type": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_capsule(kind: str) -> None:
    run, backend = program(LINE, double)
    capsules = Capsules()
    refusal(lambda: run(Shared(lambda: capsules.capsule(**MALFORMED[kind]))), CgbundleError)
    assert not backend.calls


def test_what_is_no_capsule_and_no_device() -> None:
    run, _ = program(LINE, double)
    capsules = Capsules()
    for capsule in (None, 5, "x", object(), Odd(), lambda: 1 / 0):
        refusal(lambda capsule=capsule: run(Shared(capsule)), CgbundleError)  # type: ignore[misc]
    for device in (None, 5, (1, 0, 0), ("a", "b"), lambda: 1 / 0, (10**30, 0), (-1, 0), (1.0, 0), Odd()):
        refusal(lambda device=device: run(Shared(capsules.capsule(), device)), CgbundleError)  # type: ignore[misc]
    assert run(Shared(capsules.capsule(strides=(0, 1))))  # a stride of 0: one row, repeated
    one = capsules.capsule()
    assert run(Shared(one)) and run(Shared(one))  # a call reads the capsule but does not consume it


# --- NumPy ---------------------------------------------------------------------------------------------------------------


def test_arrays_that_hold_no_numbers_or_say_what_is_not_so() -> None:
    numpy = pytest.importorskip("numpy")
    run, _ = program(LINE, double)
    casting, _ = program(LINE, double, cast=True)
    good = numpy.arange(1, 7, dtype=numpy.float32).reshape(2, 3)
    kinds = [object, "M8[s]", "m8[s]", "U3", "S3", "V4", [("a", "f4")], numpy.longdouble, numpy.clongdouble, ">f4"]
    for runner in (run, casting):
        for kind in kinds:
            refusal(lambda runner=runner, kind=kind: runner(numpy.zeros((2, 3), kind)), CgbundleError)  # type: ignore[misc]
        for value in (numpy.float32(1), numpy.zeros((0, 3), numpy.float32), numpy.ma.zeros((2, 3), dtype=numpy.float32)):
            refusal(lambda runner=runner, value=value: runner(value), CgbundleError)  # type: ignore[misc]
        for kind in (numpy.float32, numpy.float16):
            refusal(lambda runner=runner, kind=kind: runner(numpy.broadcast_to(kind(1), (BIG, 3))), CgbundleError)  # type: ignore[misc]
    for name, value in {
        "shape": [2, 3],
        "dtype": "x",
        "flags": None,
        "strides": (9,),
        "__array_interface__": {"data": ("x", 0)},
    }.items():
        liar = type("Liar", (numpy.ndarray,), {name: property(lambda self, value=value: value)})
        assert numpy.array_equal(run(good.view(liar))[0], 2 * good), name
    assert "numpy" in sys.modules
