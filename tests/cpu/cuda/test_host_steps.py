"""A program of copy and host steps with a real shared object. The fake driver's GPU memory is host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cgbundle
from cgbundle.cpu import libtorch
from cgbundle.cpu.host_region import HostRegion
from cgbundle.format import archive, file_names, safetensors_files
from cgbundle.format.schema import Manifest, Program, Region, Step, Target, TensorSpec, Value, Weight
from cgbundle.gpu.backend import CudaBackend
from cgbundle.validate import bundle as verify
from cgcompile.targets.cpu.aoti import compile_cpu
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.edits import edited
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

FILE = "host/pick.so"
KEYS = (2, 5)
SCALE = [number / 4 - 2 for number in range(16)]  # Inductor inlines constants of up to 8 elements


class Pick(torch.nn.Module):
    """A sum over a data-dependent number of elements, times a weight; and an output that is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(SCALE))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[x > 0].sum() * self.scale, (x + 1).t()


def floats(tensor: torch.Tensor) -> safetensors_files.Tensor:
    return "float32", tuple(tensor.shape), lambda: tensor.detach().contiguous().numpy().tobytes()


def program(key: int) -> Program:
    """Copies x to the host, runs the region there, and copies both results back."""

    def value(memory: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Value:
        return Value(dtype="float32", shape=shape, strides=strides, memory=memory, offset=offset)

    def both(memory: str, first: int, second: int) -> tuple[Value, Value]:
        return value(memory, first, (16,), (1,)), value(memory, second, (3, key), (1, 3))

    def copy(source: int, target: int) -> Step:
        return Step(kind="copy", region=0, file="", inputs=(source,), outputs=(target,))

    return Program(
        key=(key,),
        values=(
            value("inputs", 0, (key, 3), (3, 1)),
            value("host", 0, (key, 3), (3, 1)),
            *both("host", 256, 512),
            *both("arena", 0, 256),
        ),
        inputs=(0,),
        outputs=(4, 5),
        steps=(
            copy(0, 1),
            Step(kind="host", region=0, file="", inputs=(1,), outputs=(2, 3)),
            copy(2, 4),
            copy(3, 5),
        ),
        arena=512,
        static=256,
    )


def example(key: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key)
    return torch.randn(key, 3, generator=generator)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a bundle for a GPU whose only region runs on the host, with its weight in host memory."""
    folder = tmp_path_factory.mktemp("mixed") / "pick.cgb"
    (folder / "host").mkdir(parents=True)
    model, rows = Pick().eval(), torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, (example(3),), dynamic_shapes=({0: rows},))
    compiled = compile_cpu(exported, tmp_path_factory.mktemp("work"), lambda text: None)
    os.rename(compiled.path, folder / FILE)
    region = HostRegion((folder / FILE).read_bytes(), libtorch.load(torch.__version__), FILE)
    ((constant, name),) = region.constants()
    region.close()
    assert name.endswith("scale")
    (folder / file_names.PROGRAM).write_bytes(b"PK, but not really\n")
    with open(folder / file_names.WEIGHTS, "wb") as file:
        safetensors_files.write(file, {"scale": floats(model.scale), "other": floats(torch.arange(7.0))})
    self_test = {}
    for key in KEYS:
        self_test[file_names.self_test_entry((key,), "input", 0)] = floats(example(key))
        for index, output in enumerate(model(example(key))):
            self_test[file_names.self_test_entry((key,), "output", index)] = floats(output)
    with open(folder / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, self_test)
    base = tiny_bundle.manifest()
    entry = base.entries[0]
    tiny_bundle.finish(
        folder,
        edited(
            base,
            target=Target(
                kind="cuda", arch="sm_90", level="", features=compiled.features, torch=torch.__version__.split("+")[0], driver=12000
            ),
            dimensions=(replace(entry.dimensions[0], sizes=KEYS, pad="no", chunk=False),),
            outputs=(
                TensorSpec(name="total", dtype="float32", shape=(16,), order=(0,)),
                TensorSpec(name="turned", dtype="float32", shape=(3, "batch"), order=(1, 0)),
            ),
            result={"tuple": [{"tensor": 0}, {"tensor": 1}]},
            weights=(
                Weight(name="other", tensor="other", dtype="float32", shape=(7,), strides=(1,), memory="weights", offset=0),
                Weight(name="scale", tensor="scale", dtype="float32", shape=(16,), strides=(1,), memory="host"),
            ),
            memories=(("weights", 256), ("inputs", 256), ("arena", 512), ("host", 1024)),
            regions=(Region(name="pick", kind="host", reason="data-dependent-shape", file=FILE, constants=((constant, 1),)),),
            programs=tuple(map(program, KEYS)),
            self_test=replace(entry.self_test, bounds=(1e-5, 1e-5), proofs=tuple([tiny_bundle.proof(key) for key in KEYS])),
        ),
    )
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver()
    install(monkeypatch, driver)
    yield driver
    assert not driver.live and not driver.pinned
    assert driver.retained == 0


def manifest_of(folder: Path) -> Manifest:
    return archive.read_manifest(str(folder))


def test_the_bundle_is_sound(bundle: Path) -> None:
    verify.check_bundle(archive.Archive(str(bundle)), "full")
    assert verify.examine(archive.Archive(str(bundle))) == []


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_a_mixed_program_computes(fake: FakeDriver, bundle: Path, mode: str, lazy: bool) -> None:
    model = Pick().eval()
    with cgbundle.load(bundle, mode=mode, lazy=lazy) as loaded:
        for key in (*KEYS, *KEYS):
            x = torch.randn(key, 3)
            total, turned = loaded(x)
            expected = model(x)
            torch.testing.assert_close(total, expected[0].detach())
            assert turned.tolist() == expected[1].tolist()


def test_the_self_test_passes_with_poison(fake: FakeDriver, bundle: Path) -> None:
    from cgbundle.loader import open_program
    from cgbundle.self_test import POISON, replay_self_test

    with open_program(bundle, poison=POISON) as loaded:
        results = replay_self_test(loaded)
        assert [result.passed(loaded.manifest.entries[0].self_test.compare) for result in results] == [True] * len(KEYS)


SCRIPT = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"{name} is banned here", name=name)
sys.meta_path.insert(0, Ban())
import json
import cgbundle
from cgbundle.tensors.tensor import from_bytes
from array import array
from tests.helpers.drivers.fake_driver import FakeDriver, install
class Patch:
    setattr = staticmethod(setattr)
install(Patch, FakeDriver())
with cgbundle.load(sys.argv[1]) as program:
    x = from_bytes(array("f", [1, -1, 2, 3, -4, 5]).tobytes(), "float32", (2, 3))
    total, turned = program(x)
    print(json.dumps([array("f", total.tobytes()).tolist(), array("f", turned.tobytes()).tolist(), "torch" in sys.modules]))
"""


def test_without_importing_torch(bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(bundle)],
        env={"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "bundles")))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[11 * scale for scale in SCALE], [2, 4, 0, -3, 3, 6], False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strides": (5, 1)},
            r"expected float32 \[3, 5\] with strides \[5, 1\], got \[3, 5\] with strides \[1, 3\]",
        ),
        ({"shape": (5, 3), "strides": (1, 5)}, r"expected .*, got \[3, 5\] with strides"),
        ({"dtype": "int32"}, r"expected int32 \[3, 5\] .*, got \[3, 5\] with strides \[1, 3\] and another dtype"),
    ],
)
def test_an_output_that_is_not_what_the_bundle_says(
    fake: FakeDriver, bundle: Path, changes: dict[str, object], message: str
) -> None:
    manifest = manifest_of(bundle)
    last = manifest.entries[0].programs[1]
    values = tuple([replace(value, **changes) if index in (3, 5) else value for index, value in enumerate(last.values)])
    broken = edited(manifest, programs=(manifest.entries[0].programs[0], replace(last, values=values)))
    calls = CudaBackend(ArchiveOf(bundle, broken), 0, "graph")
    x = example(5)
    with raises("library-refused", match=f"^{FILE}: an output: {message}"), calls.locked(None) as turn:
        calls.run(1, [x.data_ptr()], None, turn)
    with calls.locked(None) as turn:
        calls.run(0, [example(2).data_ptr()], None, turn)  # the next call works
    calls.close()


def test_another_number_of_inputs_is_refused(fake: FakeDriver, bundle: Path) -> None:
    manifest = manifest_of(bundle)
    (program, *_) = manifest.entries[0].programs
    steps = list(program.steps)
    steps[1] = replace(steps[1], inputs=(1, 1))
    with raises("library-refused", match=f"^{FILE}: expected 2 inputs, got 1"):
        CudaBackend(ArchiveOf(bundle, edited(manifest, programs=(replace(program, steps=tuple(steps)),))), 0, "graph")
    steps[1] = replace(steps[1], inputs=(1,), outputs=(2,))
    with raises("library-refused", match=f"^{FILE}: expected 1 outputs, got 2"):
        CudaBackend(ArchiveOf(bundle, edited(manifest, programs=(replace(program, steps=tuple(steps)),))), 0, "graph")


def test_a_constant_that_the_bundle_does_not_give(fake: FakeDriver, bundle: Path) -> None:
    manifest = manifest_of(bundle)
    with raises("library-refused", match=f"^{FILE}: "):
        CudaBackend(ArchiveOf(bundle, replace(manifest, regions=(replace(manifest.regions[0], constants=()),))), 0, "graph")


def test_what_the_machine_lacks_is_said_before_anything_runs(
    fake: FakeDriver, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(bundle)
    with raises("wrong-machine", match="lacks avx1024"):
        CudaBackend(ArchiveOf(bundle, replace(manifest, target=replace(manifest.target, features=("avx1024",)))), 0, "graph")
    assert not fake.calls
    monkeypatch.setenv(libtorch.VARIABLE, str(tmp_path))
    with raises("library-missing", match="no libtorch_cpu.so there"):
        CudaBackend(ArchiveOf(bundle, manifest), 0, "graph")
