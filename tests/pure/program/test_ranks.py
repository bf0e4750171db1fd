"""A model over several GPUs is called as one program, on a fake driver whose streams work in any order."""

from __future__ import annotations

import ctypes
import shutil
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import cgbundle
from cgbundle.program.ranks import RanksBackend
from cgbundle.self_test import replay_self_test
from cgbundle.tensors.tensor import Tensor, from_bytes
from tests.helpers.bundles import rank_bundles
from tests.helpers.bundles.rank_bundles import FLOATS, KEYS, expected, inputs
from tests.helpers.drivers.fake_driver import install
from tests.helpers.drivers.ranks_driver import RanksDriver
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

IMAGE = next((GOLDEN / "v1/gpt_two.cgb/kernels").iterdir()).read_bytes()
"""An ELF file for sm_90. The fake driver has its own kernels."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("ranks") / "two.cgb", 2)


def written(folder: Path, world: int) -> Path:
    rank_bundles.write(folder, IMAGE, world)
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[RanksDriver]:
    yield from installed(monkeypatch, RanksDriver())


def installed(monkeypatch: pytest.MonkeyPatch, driver: RanksDriver) -> Iterator[RanksDriver]:
    install(monkeypatch, driver)
    yield driver
    check_nothing_is_left(driver)


def check_nothing_is_left(fake: RanksDriver) -> None:
    fake.settle()
    assert not fake.live and not fake.mapped
    assert fake.retained == 0


def batch(key: int, seed: int = 0, device: int | None = None) -> Tensor:
    """Returns numbers on the CPU, or the same memory declared as a GPU's."""
    tensor = from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))
    return tensor if device is None else Tensor(tensor.address, tensor.dtype, tensor.shape, tensor.strides, tensor, device)


def flat(tensor: Tensor) -> list[float]:
    return array("f", ctypes.string_at(tensor.address, tensor.shape[0] * FLOATS * 4)).tolist()


def wanted(key: int, seed: int = 0, world: int = 2) -> list[float]:
    return expected(inputs(key, seed), world).tolist()


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_it_is_called_like_any_program(fake: RanksDriver, path: Path, mode: str) -> None:
    with cgbundle.load(path, devices=[0, 1], mode=mode) as program:
        for seed, key in enumerate((4, 8, 4, 8, 8)):
            assert flat(program(batch(key, seed))) == wanted(key, seed)
        assert program.int_keys == tuple((key,) for key in KEYS)
        assert [result.passed("bits") for result in replay_self_test(program)] == [True, True]
    with cgbundle.load(path) as program:  # the first devices
        assert flat(program(batch(4))) == wanted(4)


def test_two_ranks_may_be_on_one_gpu(fake: RanksDriver, path: Path) -> None:
    with cgbundle.load(path, devices=[1, 1]) as program:
        assert flat(program(batch(4))) == wanted(4)


@settings(max_examples=25, deadline=None)
@drawn(
    calls=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from((None, 0))), min_size=1, max_size=8),
    seed=st.integers(0, 1 << 30),
    world=st.sampled_from((2, 3)),
)
def test_any_order_of_the_streams(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, int | None]], seed: int, world: int
) -> None:
    """Every output is right, in whatever order the streams run, for inputs on the CPU and the GPU of several sizes."""
    folder = BUNDLES.get(world) or BUNDLES.setdefault(world, written(tmp_path_factory.mktemp("any") / "many.cgb", world))
    with pytest.MonkeyPatch.context() as patch:
        for fake in installed(patch, RanksDriver(world, seed)):
            with cgbundle.load(folder, outputs="view") as program:
                for number, (key, device) in zip(count(), calls):
                    held = batch(key, number, device)  # kept until the stream has read it, as an allocator with streams would
                    output = program(held)
                    if device is not None:
                        fake.settle()
                    assert flat(output.tensor) == wanted(key, number, world)


BUNDLES: dict[int, Path] = {}


def test_calls_that_nobody_waits_for_do_not_write_over_each_others_inputs(fake: RanksDriver, path: Path) -> None:
    with cgbundle.load(path, outputs="copy") as program:
        held = [batch(8, seed, 0) for seed in range(6)]
        last = [program(tensor) for tensor in held][-1]
        fake.settle()
        assert flat(last) == wanted(8, 5)


def test_a_rank_that_does_not_come_is_named(fake: RanksDriver, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = cgbundle.load(path, timeout=0.5)
    backend = program._backend
    assert isinstance(backend, RanksBackend)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_follow", lambda *_: None)
        with raises("rank-timeout", match=r"rank 0 on device 0 waited 0.5 s for rank 1, which did not respond"):
            program(batch(4))
    with raises("rank-timeout"):  # the two ranks wait for different exchanges
        program(batch(4))
    program.close()
    check_nothing_is_left(fake)
    with cgbundle.load(path) as again:
        assert flat(again(batch(4))) == wanted(4)


def test_what_ranks_refuse(fake: RanksDriver, path: Path) -> None:
    for devices in ([0], [0, 1, 0]):
        with raises("ranks-refused", match=r"over 2 GPUs, devices="):
            cgbundle.load(path, devices=devices)
    with raises("wrong-machine", match="device 2"):
        cgbundle.load(path, devices=[0, 2])
    with raises("ranks-refused", match="one rank"):
        cgbundle.load(path / "ranks/1")
    with raises("ranks-refused", match="replicas=True: the model is over 2 GPUs"):
        cgbundle.load(path, replicas=True)
    with pytest.raises(ValueError, match="timeout"):
        cgbundle.load(path, timeout=0)
    with cgbundle.load(path) as program:
        with raises("ranks-refused", match="sessions"):
            program.session()
        with raises("ranks-refused", match="weights"):
            program.update({"offsets": from_bytes(bytes(512), "float32", (128,))})
        stream = 0x7000
        fake.capturing.add(stream)
        with raises("capture-refused"), program._backend.locked(stream):
            pass


GIVING_BACK = ("Destroy", "Free", "Unmap", "Unload", "Release", "PopCurrent", "ExchangeStreamCaptureMode")
"""Parts of names of calls after whose failure objects may remain."""


def test_a_gpu_on_which_not_all_blocks_fit_at_once(fake: RanksDriver, path: Path) -> None:
    fake.multiprocessors = 1
    cgbundle.load(path).close()
    fake.devices = 4  # one of these is used: the fake driver's number of ranks is its number of devices
    with raises(
        "wrong-machine",
        match=r"device 0 \(Fake GPU\) can run 2 blocks of cgcompile_packets_float32 at once, but 4 x 1 blocks wait for each other",
    ):
        cgbundle.load(written(path.parent / "four.cgb", 4), devices=[0] * 4)


def test_every_failure_of_the_driver_gives_all_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each driver call of a load fails once."""
    for at in count():
        fake = RanksDriver()
        install(monkeypatch, fake)
        fake.fail_at = at
        try:
            program = cgbundle.load(path)
        except cgbundle.CgbundleError:
            failed, fake.fail_at = fake.calls[at], -1
            if not any(word in failed for word in GIVING_BACK):
                fake.settle()
                left = [thing for thing in fake.live.values() if thing != "stream" or failed != "cuCtxPushCurrent"]
                assert not left and not fake.mapped and (fake.retained == 0 or failed == "cuCtxPushCurrent"), (at, failed)
        else:
            fake.fail_at = -1
            program.close()
            if len(fake.calls) <= at:
                break
    assert at > 60


def test_a_rank_of_another_build_is_refused(fake: RanksDriver, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.cgb"
    shutil.copytree(path, other)
    three = written(tmp_path / "three.cgb", 3)
    shutil.copy(three / "ranks/1/manifest.json", other / "ranks/1/manifest.json")
    with raises("file-damaged", match="ranks/1/manifest.json"):
        cgbundle.load(other)
