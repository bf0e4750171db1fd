"""A training step, captured and cross-compiled: losses equal eager PyTorch, and saved state continues bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from safetensors.torch import load_file, save_file  # noqa: E402

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from examples import train  # noqa: E402

STEPS = 40
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module", params=["capture", "cross-compile"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> cgcompile.Built:
    path = tmp_path_factory.mktemp("train") / "train.cgb"
    sizes, prove = {"evaluate": {"batch": [train.BATCH]}}, "none" if request.param == "cross-compile" else "interpret"
    return cgcompile.build(
        train.model(), train.entries(), sizes=sizes, out=path, target="cuda", record=request.param, prove=prove
    )  # fmt: skip


@pytest.fixture(scope="module")
def batches() -> Batches:
    torch.manual_seed(1)
    return [tuple([ids.cuda() for ids in train.sequences(train.BATCH)]) for _ in range(STEPS)]


def losses(program: cgbundle.Program, batches: Batches) -> list[float]:
    return [float(program.step(*batch)) for batch in batches]


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_steps_are_those_of_eager_pytorch(built: cgcompile.Built, batches: Batches, mode: str) -> None:
    eager = train.model().cuda()
    with torch.no_grad():
        expected = [float(eager.step(*batch)) for batch in batches]
    with cgbundle.load(built.path, mode=mode) as program:
        actual = losses(program, batches)
        assert actual == pytest.approx(expected, rel=1e-3) and actual[-1] < actual[0]
        assert (program.evaluate(batches[0][0]) == eager.evaluate(batches[0][0])).float().mean() > 0.99


def test_training_from_saved_state_continues_bit_for_bit(built: cgcompile.Built, batches: Batches, tmp_path: Path) -> None:
    """This requires that no result of a step depends on the order of atomic additions."""
    file = tmp_path / "state.safetensors"
    with cgbundle.load(built.path) as program:
        first = losses(program, batches[: STEPS // 2])
        save_file({name: torch.from_dlpack(program.state[name]).cpu().clone() for name in program.state}, file)
        first += losses(program, batches[STEPS // 2 :])
        last = {name: torch.from_dlpack(program.state[name]).cpu().clone() for name in program.state}
    with cgbundle.load(built.path) as program:
        for name, value in load_file(file).items():
            program.state[name] = value
        assert losses(program, batches[STEPS // 2 :]) == first[STEPS // 2 :]
        for name, value in last.items():
            assert torch.equal(torch.from_dlpack(program.state[name]).cpu(), value), name
    with cgbundle.load(built.path) as program:
        assert losses(program, batches) == first
