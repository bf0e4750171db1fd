"""A bundle on several GPUs is called as one program, on a fake driver."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import cgbundle
from cgbundle.errors import CgbundleError
from cgbundle.format import safetensors_files
from cgbundle.format.file_names import PROGRAM, SELF_TEST, self_test_entry
from cgbundle.format.schema import Dimension, Manifest, SelfTest, TensorSpec
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program.program import Program
from cgbundle.program.replicas import Replicas
from cgbundle.tensors.tensor import Tensor, from_bytes
from cgcompile.bundle.manifest_text import describe_files
from tests.helpers.bundles import cuda_bundles, state_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, expected, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import POSITIONAL, bounds, proof, seal
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

IMAGE = next((GOLDEN / "v1/gpt_two.cgb/kernels").iterdir()).read_bytes()
"""An ELF file for sm_90. The fake driver has its own kernels."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver(devices=3)
    install(monkeypatch, driver)
    yield driver
    assert not driver.live
    assert driver.retained == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "tiny.cgb")
    return tmp_path / "tiny.cgb"


def write(folder: Path) -> Manifest:
    """Writes the bundle of `cuda_bundles` with a signature and a self-test, so that `load` accepts it."""
    manifest = cuda_bundles.write(folder, IMAGE)
    (folder / PROGRAM).write_bytes(b"PK, but not really\n")
    contents = {}
    for key in KEYS:
        for kind, data in (("input", inputs(key)), ("output", expected(inputs(key)))):
            contents[self_test_entry((key,), kind, 0)] = ("float32", (key, FLOATS), partial(bytes, data))
    with open(folder / SELF_TEST, "wb") as file:
        safetensors_files.write(file, contents)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", FLOATS), order=(0, 1))
    manifest = edited(
        manifest,
        dimensions=(Dimension(name="batch", sizes=KEYS, pad="no", chunk=False, reason="not proved"),),
        inputs=(spec,),
        outputs=(replace(spec, name="y"),),
        call={"call": [["x", {"tensor": 0}]]},
        parameters=(POSITIONAL,),
        result={"tensor": 0},
        self_test=SelfTest(
            compare="bits", calls=1, expected="recording", bounds=bounds("float32"),
            proofs=tuple([proof(key, method="none", tolerance=0.0) for key in KEYS]),
        ),
        files=describe_files(str(folder)),
    )  # fmt: skip
    seal(folder, manifest)
    return manifest


def batch(key: int, seed: int = 0, device: int | None = None) -> Tensor:
    """Returns numbers on the CPU, or the same memory declared as a GPU's."""
    tensor = from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))
    return tensor if device is None else Tensor(tensor.address, tensor.dtype, tensor.shape, tensor.strides, tensor, device)


def wanted(key: int, seed: int = 0) -> list[float]:
    return expected(inputs(key, seed)).tolist()


def flat(tensor: Tensor) -> list[float]:
    return array("f", ctypes.string_at(tensor.address, tensor.shape[0] * FLOATS * 4)).tolist()


def test_a_copy_on_every_device_and_calls_by_turns(fake: FakeDriver, path: Path) -> None:
    with cgbundle.load(path, replicas=True) as replicas:
        assert replicas.devices == (0, 1, 2) and "devices 0, 1, 2" in repr(replicas)
        assert [program._backend.device for program in replicas.programs] == [0, 1, 2]
        for seed, key in enumerate((4, 4, 8, 4, 8)):
            assert flat(replicas(batch(key, seed))) == wanted(key, seed)
        assert flat(replicas.forward(batch(4))) == flat(replicas["forward"](x=batch(4))) == wanted(4)
        assert [flat(y) for y in (*replicas.replay([batch(8)]), *replicas["forward"].replay([batch(8)]))] == [wanted(8)] * 2
        assert (replicas.int_keys, replicas.memory) == (replicas.programs[0].int_keys, replicas.programs[0].memory)


def test_inputs_of_a_gpu_are_served_there(fake: FakeDriver, path: Path) -> None:
    with cgbundle.load(path, devices=[2, 0], replicas=True, outputs="view") as replicas:
        for device in (0, 0, 2, 0):
            output = replicas(batch(4, device, device))
            assert output.tensor.device == device and flat(output.tensor) == wanted(4, device)
            assert replicas(output).tensor.device == device  # an output is on the device of its input
        with raises("input-device", match="lie on CUDA device 1, and the bundle is on 2, 0"):
            replicas(batch(4, 0, 1))
        with raises("input-kind"):
            replicas(3.5)


def test_a_call_goes_where_the_fewest_run(fake: FakeDriver, path: Path) -> None:
    with cgbundle.load(path, devices=[0, 1], replicas=True) as replicas:
        first, _ = replicas.programs
        with ThreadPoolExecutor(1) as pool, first._backend.locked(None):
            held = pool.submit(replicas, batch(4))
            while replicas._load._running == [0, 0]:  # until the call waits for the first device, which this thread holds
                pass
            for seed in range(5):
                assert flat(replicas(batch(4, seed))) == wanted(4, seed)  # all these calls run on the second device
            assert replicas._load._running == [1, 0] and not held.done()
        assert flat(held.result()) == wanted(4)
        assert replicas._load._running == [0, 0]


def test_many_threads(fake: FakeDriver, path: Path) -> None:
    with cgbundle.load(path, replicas=True) as replicas, ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(lambda seed: flat(replicas(batch(8, seed))), range(60)))
    assert outputs == [wanted(8, seed) for seed in range(60)]


def test_state_stays_on_a_device(fake: FakeDriver, tmp_path: Path) -> None:
    manifest = state_bundles.write(tmp_path / "tiny.cgb")
    opened = [
        Program(manifest, CudaBackend(ArchiveOf(tmp_path / "tiny.cgb", manifest), device), "pad", "copy") for device in (0, 1)
    ]
    with Replicas(opened) as replicas:
        for call in (lambda: replicas(batch(4)), lambda: replicas.replay([batch(4)])):
            with raises("replica-state", match="the model keeps 'total' from call to call"):
                call()
        sessions = [replicas.session() for _ in range(4)]
        assert [session._backend.device for session in sessions] == [0, 1, 0, 1]
        for session in sessions:
            assert session(batch(4))["total"].tolist() == [a + b for a, b in zip(range(FLOATS), inputs(4), strict=False)]


def test_an_update_is_on_all_devices_or_on_none(fake: FakeDriver, path: Path) -> None:
    other = array("f", [number + 1 for number in range(KEYS[-1] * FLOATS)])
    weights = {"offsets": from_bytes(other.tobytes(), "float32", (len(other),)), "small": from_bytes(b"abc", "uint8", (3,))}
    old = {"offsets": from_bytes(array("f", range(len(other))).tobytes(), "float32", (len(other),))}
    before, after = wanted(4), [number + 1 for number in wanted(4)]
    with cgbundle.load(path, devices=[0, 1], replicas=True, lazy=False) as replicas:
        # driver calls are counted, so no background thread may make any
        replicas.update(weights)
        assert [flat(program(batch(4))) for program in replicas.programs] == [after, after]
        replicas.update(old, partial=True)
        assert [flat(program(batch(4))) for program in replicas.programs] == [before, before]
        calls = len(fake.calls)
        replicas.update(weights, partial=True)
        second = [place for place, name in enumerate(fake.calls) if place >= calls and name == "cuStreamCreate"][1]
        replicas.update(old, partial=True)
        fake.fail_at = len(fake.calls) + second - calls
        with raises("driver-failed", match="cuStreamCreate"):
            replicas.update(weights)  # the first device has been updated by now
        assert [flat(program(batch(4))) for program in replicas.programs] == [before, before]
        with raises("update-invalid", match="device 0"):
            replicas.update({**weights, "small": Tensor(0, "uint8", (3,), (1,), None, 0)})


def test_options_that_replicas_refuse(fake: FakeDriver, path: Path) -> None:
    for devices in ([], [1, 1]):
        with pytest.raises(ValueError, match="different ones, at least one"):
            cgbundle.load(path, devices=devices, replicas=True)
    with pytest.raises(ValueError, match="expected devices alone"):
        cgbundle.load(path, device=1, replicas=True)
    with raises("option-refused", match=r"devices=\[0, 1\]: the bundle is for one device"):
        cgbundle.load(path, devices=[0, 1])
    with raises("option-refused", match="nothing of it runs on a GPU"):
        cgbundle.load(GOLDEN / "v1/cpu_fixed.cgb", replicas=True)
    with raises("wrong-machine", match="device 7: this machine has 3 visible GPUs"):
        cgbundle.load(path, devices=[0, 7], replicas=True)
    with cgbundle.load(path, replicas=True) as replicas:
        with raises("entry-missing", match="no entry 'decode', but forward"):
            replicas["decode"]
        with raises("entry-missing", match=r"no entry 'forwrd' \(did you mean forward\?\), but forward"):
            replicas["forwrd"]
        with pytest.raises(AttributeError, match="no attribute 'decode', and the bundle no entry but forward"):
            replicas.decode  # noqa: B018
        replicas.close()
        with raises("program-closed"):
            replicas(batch(4))


def test_whichever_call_fails_nothing_is_left(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    counted = FakeDriver(devices=2)
    install(monkeypatch, counted)
    replica_set = cgbundle.load(path, replicas=True)
    count = len(counted.calls)
    replica_set.close()
    refused = 0
    for number in range(0, count, 3):
        fake = FakeDriver(devices=2)
        fake.fail_at = number
        install(monkeypatch, fake)
        try:
            replica_set = cgbundle.load(path, replicas=True)
        except CgbundleError:
            refused += 1
        else:  # calls of threads mix, and their number varies a little
            fake.fail_at = -1  # a close that fails may leave objects
            replica_set.close()
        give_back = ("Destroy", "Free", "Unload", "Release", "PopCurrent")  # after these the object may remain
        if not any(word in fake.calls[number] for word in give_back):
            assert not fake.live and fake.retained == 0, fake.calls[number]
    assert refused > 10
