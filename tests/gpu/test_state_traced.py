"""State, mutated inputs and random numbers in cross-compiled bundles."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.tensors.tensor import from_bytes  # noqa: E402
from tests.gpu.helpers.hidden import STATEFUL, built_without_gpu  # noqa: E402
from tests.gpu.helpers.self_tests import passed  # noqa: E402
from tests.helpers.models import state_checks as checks  # noqa: E402
from tests.helpers.models import written_models  # noqa: E402
from tests.helpers.models.state_models import SIZES  # noqa: E402
from tests.helpers.places import ROOT  # noqa: E402


def traced(name: str, folder: Path, recorder: str) -> Path:
    if recorder == "without-gpu":
        return built_without_gpu("state", name, folder / f"{name}.cgb")
    make, inputs = STATEFUL[name]
    return build(make(), inputs, list(SIZES), folder / f"{name}.cgb", recorder)


def build(model: Any, inputs: Any, sizes: Any, path: Path, recorder: str = "cross-compile") -> Path:
    """Builds a bundle and returns its path. The build does not interpret a cross-compiled bundle, because the tests replay it."""
    prove = "none" if recorder == "cross-compile" else "interpret"
    return cgcompile.build(model, inputs, sizes=sizes, out=path, target="cuda", record=recorder, prove=prove, train=True).path


@pytest.fixture(scope="module", params=["cross-compile", "without-gpu"])
def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced("running", tmp_path_factory.mktemp("running"), request.param)


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_calls_share_state_and_sessions_do_not(stateful: Path, outputs: str, mode: str) -> None:
    checks.check_state(stateful, "cuda", mode, outputs)


def test_state_is_guarded_and_live(stateful: Path) -> None:
    checks.check_state_is_guarded(stateful, "cuda")
    checks.check_a_buffer_that_is_handed_out_is_live(stateful, "cuda")


def test_the_self_test_of_state_passes_without_torch(stateful: Path) -> None:
    passed(stateful)


@pytest.mark.parametrize("recorder", ["cross-compile", "without-gpu"])
def test_random_numbers_are_fresh_and_repeatable(tmp_path: Path, recorder: str) -> None:
    path = traced("draws", tmp_path, recorder)
    checks.check_random(path, "cuda")
    passed(path)


@pytest.mark.parametrize("recorder", ["cross-compile", "without-gpu"])
def test_outputs_that_share_memory_share_it(tmp_path: Path, recorder: str) -> None:
    path = traced("looks", tmp_path, recorder)
    checks.check_looks(path, "cuda")
    checks.check_looks_as_views(path, "cuda")


@pytest.mark.parametrize("name", ["step", "views", "kinds"])
def test_written_inputs_are_handed_back(tmp_path: Path, name: str) -> None:
    make, inputs, written = written_models.MODELS[name]
    path = build(make(), inputs, list(SIZES), tmp_path / "written.cgb")
    network = make().cuda()
    for device in ("cuda", "cpu"):
        with cgbundle.load(path) as program:
            assert program.manifest.entries[0].mutated_inputs == written
            for round_ in range(4):
                fresh = tuple([tensor.cuda() for tensor in written_models.draw(inputs, SIZES[round_ % 2], round_)])
                wanted, after = written_models.eager(network, fresh)
                tensors = [tensor.to(device, copy=True) for tensor in fresh]
                result = program(*tensors)
                results = result if isinstance(result, tuple) else (result,)
                for got, want in zip([*results, *tensors], [*wanted, *after], strict=True):
                    coarse = 2e-2 if want.dtype is torch.bfloat16 else 1e-4
                    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=coarse, atol=coarse)
    passed(path)


def test_a_decoder_generates_the_tokens_that_eager_pytorch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODER_LAYERS", "2")
    monkeypatch.setenv("DECODER_WIDTH", "128")
    source = str(ROOT / "examples/decoder.py")
    sizes = {"prefill": {"batch": [1, 2], "seq": [8]}, "decode": {"batch": [1, 2]}}
    path = build(source, None, sizes, tmp_path / "decoder.cgb")
    generate = runpy.run_path(str(ROOT / "examples/generate.py"))["generate"]
    network = runpy.run_path(source)["model"]().cuda()
    prompt = [[(7 + 31 * row + 17 * place) % 50257 for place in range(8)] for row in range(2)]
    with torch.no_grad():
        ids, _ = network(torch.tensor(prompt, device="cuda"))
        want = [ids]
        while len(want) < 40:
            ids, _ = network(ids)
            want.append(ids)
    expected = torch.cat(want, 1).tolist()
    for mode in ("graph", "stream"):
        with cgbundle.load(path, mode=mode) as program, program.session() as other:
            assert generate(program, prompt, 40) == expected
            assert generate(other, prompt[:1], 40) == expected[:1]
            assert generate(program, prompt, 40) == expected
            ids, _ = other.decode(from_bytes(bytes(8), "int64", (1, 1)))
    passed(path)
