"""`--autotune` on a GPU: candidates are recorded, verified and timed, and the bundle of the fastest ones gives the model's
results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgbundle.format.schema import Manifest  # noqa: E402
from cgcompile.pipeline.best.choice import ALIKE, LOWERINGS  # noqa: E402
from tests.gpu.helpers.models import GPT  # noqa: E402

SIZES = [1, 8]
TOKENS, VOCABULARY, WIDTH = 16, 256, 64
SLOWEST = 10_000
"""Microseconds; every graph of this model is faster."""


def inputs(batch: int) -> tuple[Any]:
    return (torch.randint(0, VOCABULARY, (batch, TOKENS)),)


def network() -> Any:
    torch.manual_seed(0)
    return GPT(2, WIDTH, 2, VOCABULARY, TOKENS).bfloat16().eval()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Uses an empty cache, which has no choice of an earlier build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGCOMPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def built(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cgcompile.build(network(), inputs, sizes=SIZES, out=tmp_path_factory.mktemp("best") / "gpt.cgb", autotune=True)


def chosen(manifest: Manifest) -> list[str]:
    """Returns the chosen lowering of every int_key."""
    return [row.name for program in manifest.entries[0].programs for row in program.lowerings if row.chosen]


def test_everything_was_tried_and_timed_and_the_fastest_is_chosen(built: Any) -> None:
    for program in built.manifest.entries[0].programs:
        print(program.key, program.lowerings)
        assert [row.name for row in program.lowerings] == list(LOWERINGS)
        timed = [row for row in program.lowerings if not row.reason]
        assert len(timed) >= 3, "each of them lowers this model"
        assert all(0.5 < sum(row.microseconds) < SLOWEST for row in timed)
        (best,) = [row for row in timed if row.chosen]
        assert sum(best.microseconds) <= (1 + ALIKE) * min(sum(row.microseconds) for row in timed)


@pytest.mark.parametrize("size", [1, 3, 8, 11])
def test_what_is_chosen_answers_as_the_model_does(built: Any, size: int) -> None:
    model = network().cuda()
    ids = inputs(size)[0].cuda()
    with torch.no_grad():
        want = model(ids).double()
    with cgbundle.load(built.path) as program:
        got = program(ids).double()
    assert float((got - want).abs().max() / want.abs().max()) < 4e-2


def test_its_self_test_passes_in_a_fresh_process(built: Any) -> None:
    answer = self_test.fresh(str(built.path))
    assert answer["exit_code"] == 0 and [row["passed"] for row in answer["results"]] == [True] * len(SIZES)


def test_the_same_model_is_not_searched_again(built: Any, tmp_path: Path) -> None:
    again = cgcompile.build(network(), inputs, sizes=SIZES, out=tmp_path / "gpt.cgb", autotune=True)
    assert "time" in dict(built.seconds) and "time" not in dict(again.seconds)
    assert [program.lowerings for program in again.manifest.entries[0].programs] == [
        program.lowerings for program in built.manifest.entries[0].programs
    ]


def test_a_search_without_time_keeps_the_first_lowering(cache: None, tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU())
    built = cgcompile.build(
        layers, lambda batch: torch.randn(batch, 32), sizes=[2], out=tmp_path / "m.cgb", autotune=True, autotune_timeout=0.5
    )
    assert chosen(built.manifest) == ["inductor"]
    reasons = {row.name: row.reason for row in built.manifest.entries[0].programs[0].lowerings}
    assert reasons["max-autotune"] == reasons["eager"] == "not recorded in the 0.5 seconds that the search may take"
    assert dict(built.manifest.provenance.options)["autotune_timeout"] == "0.5"


def test_a_model_cut_by_the_host_that_keeps_state(cache: None, tmp_path: Path) -> None:
    class Cut(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.register_buffer("calls", torch.zeros(32))

        def forward(self, x: Any) -> Any:
            self.calls.add_(1)
            x = torch.relu(self.before(x))
            return self.after(x / (1.0 + x[x > 0].sum().item() / x.numel())) + self.calls

    built = cgcompile.build(Cut().eval(), lambda batch: torch.randn(batch, 32), sizes=[4], out=tmp_path / "cut.cgb", autotune=True)
    rows = built.manifest.entries[0].programs[0].lowerings
    print(rows)
    graphs = sum(step.kind == "graph" for step in built.manifest.entries[0].programs[0].steps)
    assert graphs == 2 and all(len(row.microseconds) == graphs for row in rows if not row.reason)
    with cgbundle.load(built.path) as program:
        x = torch.randn(4, 32, device="cuda")
        first, second = program(x).clone(), program(x).clone()
    assert torch.allclose(second - first, torch.ones(32, device="cuda"), atol=1e-4)
