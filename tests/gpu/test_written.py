"""Captured models that mutate their inputs: afterwards the caller's tensors, on GPU or CPU, equal those of eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgbundle.format import archive  # noqa: E402
from tests.gpu.helpers.recording import record_case  # noqa: E402
from tests.helpers.models.written_models import MODELS, PLACES, WIDTH, draw, eager  # noqa: E402

SIZES = (1, 4)

BUILDS = [("step", "inductor"), ("step", "eager"), ("both", "inductor"), ("returned", "inductor"), ("kinds", "inductor")]

Case = tuple[Path, Any, Any, tuple[int, ...]]


@pytest.fixture(scope="module", params=BUILDS, ids=lambda pair: "-".join(pair))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Returns a bundle, its model on the GPU, the model's inputs, and the inputs that it mutates."""
    name, level = request.param
    make, inputs, written = MODELS[name]
    path = tmp_path_factory.mktemp("written") / f"{name}.cgb"
    cgcompile.build(make(), inputs, sizes=list(SIZES), out=path, target="cuda", lower=level, record="capture")
    return path, make().cuda(), inputs, written


def close(got: Any, want: torch.Tensor) -> None:
    actual = torch.as_tensor(got)
    assert actual.dtype == want.dtype and actual.shape == want.shape
    coarse = {torch.bfloat16: 2e-2}.get(want.dtype, 1e-4) if want.is_floating_point() else 0
    torch.testing.assert_close(actual.cpu(), want.cpu(), rtol=coarse, atol=min(coarse, 1e-4))


def outputs(result: Any) -> list[Any]:
    return [getattr(output, "tensor", output) for output in (result if isinstance(result, tuple) else (result,))]


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers with a stride of 2."""
    return torch.stack([tensor, tensor], -1)[..., 1]


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("handed", ["copy", "view"])
@pytest.mark.parametrize("kind", ["cuda", "cpu", "cuda-spread", "cpu-spread"])
def test_inputs_and_outputs_equal_eager(case: Case, kind: str, handed: str, mode: str) -> None:
    path, network, inputs, _ = case
    device, _, apart = kind.partition("-")
    with cgbundle.load(path, outputs=handed, mode=mode, lazy=apart == "") as program:
        for round_ in range(4):
            fresh = tuple([tensor.cuda() for tensor in draw(inputs, SIZES[round_ % 2], round_)])
            wanted, after = eager(network, fresh)
            tensors = [(spread if apart else torch.clone)(tensor.to(device)) for tensor in fresh]
            for got, want in zip(outputs(program(*tensors)), wanted, strict=True):
                assert got.device.type == device
                close(got, want)
            for tensor, want in zip(tensors, after, strict=True):
                close(tensor, want)


def test_the_self_test_names_what_is_written_and_passes_without_torch(case: Case) -> None:
    path, _, _, written = case
    assert archive.read_manifest(str(path)).entries[0].mutated_inputs == written
    answer = self_test.fresh(str(path))
    assert [row["passed"] for row in answer["results"]] == [True] * len(SIZES) and not answer["torch_imported"]


def test_numpy_arrays_are_updated_before_the_call_returns(case: Case) -> None:
    path, network, inputs, _ = case
    if path.stem == "kinds":
        pytest.skip("NumPy has no bfloat16")
    with cgbundle.load(path) as program:
        for round_ in range(4):
            fresh = draw(inputs, SIZES[round_ % 2], round_)
            wanted, after = eager(network, tuple([tensor.cuda() for tensor in fresh]))
            arrays = [tensor.clone().numpy() for tensor in fresh]
            for got, want in zip(outputs(program(*arrays)), wanted, strict=True):
                close(got, want)
            for array, want in zip(arrays, after, strict=True):
                close(array, want)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, inputs, _ = MODELS["step"]
    path = tmp_path_factory.mktemp("written") / "decoder.cgb"
    cgcompile.build(make(), inputs, sizes=list(SIZES), out=path, target="cuda", record="capture")
    return path


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_cache_fills_call_by_call_on_any_stream(decoder: Path, device: str) -> None:
    """No call waits for the GPU: only the order of work on streams makes a call see the cache of the previous one."""
    network = MODELS["step"][0]().to(device)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    with cgbundle.load(decoder) as program, torch.no_grad():
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                mine = [torch.zeros(4, PLACES, WIDTH, device=device), torch.zeros(1, dtype=torch.long, device=device)]
                theirs = [tensor.clone() for tensor in mine]
                rows = [torch.randn(4, WIDTH, device=device) for _ in range(PLACES)]
                got = [program(row, *mine) for row in rows]
                want = [network(row, *theirs) for row in rows]
            torch.cuda.synchronize()
            for one, other in zip([*got, *mine], [*want, *theirs], strict=True):
                close(one, other)
            assert mine[1].item() == PLACES


def test_other_tensors_of_the_caller_stay_as_they_are(decoder: Path) -> None:
    with cgbundle.load(decoder) as program:
        whole = torch.zeros(3, 4, PLACES, WIDTH, device="cuda")
        x = torch.randn(4, WIDTH, device="cuda")
        before = x.clone()
        program(x, whole[1], torch.zeros(1, dtype=torch.long, device="cuda"))
        assert torch.equal(x, before)
        elsewhere = whole.clone()
        elsewhere[1, :, 0] = 0
        assert whole[1, :, 0].any() and not elsewhere.any()
        with raises("input-unwritable", match="it shares memory with input 'x'"):
            program(whole[1, :, 0], whole[1], torch.zeros(1, dtype=torch.long, device="cuda"))


def test_a_recording_of_a_known_write_is_kept(tmp_path: Path) -> None:
    recorded, _plain = record_case("overwriting", tmp_path, "eager", written={(2,): (0,)})
    replayed = recorded.replays[2,]
    recording = replayed.contents
    assert replayed.deterministic and recording.mutated and recording.mutated[0] != recording.inputs[0]
