"""GPU inputs that a launch reads in place: the results equal those of copied inputs, even with many calls in flight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle.cuda import driver, graph_executor
from cgbundle.errors import CgbundleError, MachineError
from cgbundle.format.file_names import SELF_TEST
from cgbundle.format.safetensors_files import Mapped
from cgbundle.gpu import streams, threaded_copies
from cgbundle.self_test import inputs_of
from tests.helpers.places import GOLDEN

torch = pytest.importorskip("torch")

BUNDLES = [GOLDEN / name for name in ("v1/mlp.cgb", "v1/gpt_two.cgb", "v1/mlp.cgb", "v1/traced_fixed.cgb")]
CALLS = 300


@pytest.fixture(params=BUNDLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def bundle(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    try:
        driver.require()
        cgbundle.load(path).close()
    except (CgbundleError, MachineError) as error:
        pytest.skip(str(error))
    return path


def on_gpu(bundle: Path, program: Any) -> dict[tuple[int, ...], list[Any]]:
    """Returns the first self-test inputs of every key, on the GPU."""
    self_test = Mapped(str(bundle / SELF_TEST), SELF_TEST)
    try:
        rows = {key: inputs_of(self_test, program.manifest.entries[0], key) for key in program.int_keys}
        return {
            key: [
                torch.frombuffer(bytearray(tensor.tobytes()), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape).cuda()
                for tensor in row
            ]
            for key, row in rows.items()
        }
    finally:
        self_test.close()


def elsewhere(value: Any, at: int) -> Any:
    """Returns a copy of a tensor that starts `at` bytes after an aligned address."""
    raw = torch.empty(value.nbytes + at, dtype=torch.uint8, device="cuda")[at:]
    copy = raw.view(value.dtype).view(value.shape)
    copy.copy_(value)
    return copy


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def test_any_tensors_in_any_order(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cgbundle.load(bundle) as program:
        asked: list[int] = []
        call = driver.cu.cuGraphExecKernelNodeSetParams

        def counted(*arguments: Any) -> Any:
            asked.append(1)
            return call(*arguments)

        monkeypatch.setattr(driver.cu, "cuGraphExecKernelNodeSetParams", counted)
        self_tests = on_gpu(bundle, program)
        others = {
            key: [torch.roll(item, 1, 0).contiguous() if item.dim() else item for item in row] for key, row in self_tests.items()
        }
        with monkeypatch.context() as patch:
            patch.setattr(graph_executor, "READERS", 0)
            with cgbundle.load(bundle) as copying:
                wanted = {
                    (key, which): [tensor.clone() for tensor in flat(copying(*row))]
                    for which, rows in enumerate((self_tests, others))
                    for key, row in rows.items()
                }
                assert not asked
        rng, results = random.Random(0), []
        for _ in range(CALLS):
            key, which = rng.choice(program.int_keys), rng.randrange(2)
            row = (self_tests, others)[which][key]
            way = rng.choice(("same", "fresh", "odd", "host"))
            if way == "host":
                tensors = [tensor.cpu() for tensor in row]
            elif way == "same":
                tensors = row
            else:
                tensors = [elsewhere(tensor, 0 if way == "fresh" else 16) for tensor in row]
            results.append((key, which, flat(program(*tensors))))
            del tensors  # from here on, torch may reuse their memory on this stream
        for key, which, outputs in results:
            for one, other in zip(outputs, wanted[key, which], strict=True):
                assert torch.equal(one.cpu(), other.cpu())
        assert len(asked) > CALLS // 8


def test_large_inputs_and_outputs_of_the_host(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads copy them in small chunks; the result equals copies by the driver."""
    with cgbundle.load(bundle) as program:
        inputs = {key: [tensor.cpu() for tensor in row] for key, row in on_gpu(bundle, program).items()}
        wanted = {key: flat(program(*row)) for key, row in inputs.items()}
        asked: list[int] = []
        call = driver.cu.cuMemHostRegister
        monkeypatch.setattr(driver.cu, "cuMemHostRegister", lambda *arguments: asked.append(1) or call(*arguments))
        monkeypatch.setattr(threaded_copies, "CHUNK", 4096)
        monkeypatch.setattr(streams, "LARGE", 16)
        for turn in range(10):
            for key, row in inputs.items():
                values = [tensor.pin_memory() for tensor in row] if turn == 5 else row
                for one, other in zip(flat(program(*values)), wanted[key], strict=True):
                    assert torch.equal(one, other)
        assert asked
