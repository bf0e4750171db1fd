"""Inputs of the GPU that a launch reads where the caller has them: the bits of copied ones, many calls on their way at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle.cuda import driver, graph_executor
from cgbundle.errors import CgbundleError, MachineError
from cgbundle.format.file_names import SELF_TEST
from cgbundle.format.safetensors import Mapped
from cgbundle.gpu import outputs as gpu_outputs
from cgbundle.gpu import threaded_copies
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
    """The self-test's first inputs of every key."""
    self_test = Mapped(str(bundle / SELF_TEST), SELF_TEST)
    try:
        rows = {key: inputs_of(self_test, program.manifest.entries[0], key) for key in program.int_keys}
        return {
            key: [
                torch.frombuffer(bytearray(each.tobytes()), dtype=getattr(torch, each.dtype)).reshape(each.shape).cuda()
                for each in row
            ]
            for key, row in rows.items()
        }
    finally:
        self_test.close()


def elsewhere(value: Any, at: int) -> Any:
    """A copy of a tensor `at` bytes behind a place that is aligned as fresh tensors are."""
    raw = torch.empty(value.nbytes + at, dtype=torch.uint8, device="cuda")[at:]
    made = raw.view(value.dtype).view(value.shape)
    made.copy_(value)
    return made


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def test_any_tensors_in_any_order(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cgbundle.load(bundle) as program:
        asked: list[int] = []
        call = driver.cu.cuGraphExecKernelNodeSetParams

        def counted(*given: Any) -> Any:
            asked.append(1)
            return call(*given)

        monkeypatch.setattr(driver.cu, "cuGraphExecKernelNodeSetParams", counted)
        self_tests = on_gpu(bundle, program)
        others = {
            key: [torch.roll(each, 1, 0).contiguous() if each.dim() else each for each in row] for key, row in self_tests.items()
        }
        with monkeypatch.context() as patch:
            patch.setattr(graph_executor, "READERS", 0)
            with cgbundle.load(bundle) as copying:
                wanted = {
                    (key, which): [each.clone() for each in flat(copying(*row))]
                    for which, rows in enumerate((self_tests, others))
                    for key, row in rows.items()
                }
                assert not asked
        rng, made = random.Random(0), []
        for _ in range(CALLS):
            key, which = rng.choice(program.int_keys), rng.randrange(2)
            row = (self_tests, others)[which][key]
            way = rng.choice(("same", "fresh", "odd", "host"))
            if way == "host":
                given = [each.cpu() for each in row]
            elif way == "same":
                given = row
            else:
                given = [elsewhere(each, 0 if way == "fresh" else 16) for each in row]
            made.append((key, which, flat(program(*given))))
            del given  # its memory may be another tensor's from here on, in the order of the stream
        for key, which, found in made:
            for one, other in zip(found, wanted[key, which], strict=True):
                assert torch.equal(one.cpu(), other.cpu())
        assert len(asked) > CALLS // 8


def test_large_inputs_and_outputs_of_the_host(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As threads copy them, in small chunks here: the bits of copies by the driver."""
    with cgbundle.load(bundle) as program:
        given = {key: [each.cpu() for each in row] for key, row in on_gpu(bundle, program).items()}
        wanted = {key: flat(program(*row)) for key, row in given.items()}
        asked: list[int] = []
        call = driver.cu.cuMemHostRegister
        monkeypatch.setattr(driver.cu, "cuMemHostRegister", lambda *given: asked.append(1) or call(*given))
        monkeypatch.setattr(threaded_copies, "CHUNK", 4096)
        monkeypatch.setattr(gpu_outputs, "LARGE", 16)
        for turn in range(10):
            for key, row in given.items():
                values = [each.pin_memory() for each in row] if turn == 5 else row
                for one, other in zip(flat(program(*values)), wanted[key], strict=True):
                    assert torch.equal(one, other)
        assert asked
