"""Captured GPU bundles of models with state or with outputs that share memory equal eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from tests.helpers.models import state_checks as checks  # noqa: E402
from tests.helpers.models.state_models import SIZES, Sum, draw, draws, looks, pairs, rows, running, singles, triples  # noqa: E402


@pytest.fixture(scope="module", params=["inductor", "eager"])
def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "running.cgb"
    return cgcompile.build(
        running(), rows, sizes=list(SIZES), out=path, target="cuda", lower=request.param, record="capture", train=True
    ).path  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("looks") / "looks.cgb"
    return cgcompile.build(looks(), pairs, sizes=list(SIZES), out=path, target="cuda", record="capture").path


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "draws.cgb"
    return cgcompile.build(draws(), singles, sizes=list(SIZES), out=path, target="cuda", record="capture").path


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_calls_share_state_and_sessions_do_not(stateful: Path, outputs: str, mode: str) -> None:
    checks.check_state(stateful, "cuda", mode, outputs)


def test_callers_on_the_cpu_share_the_same_state(stateful: Path) -> None:
    network = running()
    with cgbundle.load(stateful) as program, torch.no_grad():
        for round_, batch in enumerate(checks.ORDER):
            (x,) = draw(rows, batch, round_, "cpu")
            for got, want in zip(program(x), network(x), strict=True):
                checks.near(got, want)
        checks.state_near(program, network)


def test_state_is_guarded(stateful: Path) -> None:
    checks.check_state_is_guarded(stateful, "cuda")


def test_a_buffer_that_is_handed_out_is_live(stateful: Path) -> None:
    checks.check_a_buffer_that_is_handed_out_is_live(stateful, "cuda")


def test_outputs_that_share_memory_share_it(shared: Path) -> None:
    checks.check_looks(shared, "cuda")


def test_views_of_shared_memory_go_stale_together(shared: Path) -> None:
    checks.check_looks_as_views(shared, "cuda")


def test_inputs_may_be_laid_out_in_any_way(tmp_path: Path) -> None:
    path = cgcompile.build(Sum(), triples, sizes=list(SIZES), out=tmp_path / "sum.cgb", target="cuda", record="capture").path
    for device in ("cuda", "cpu"):
        checks.check_inputs(path, device)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_random_numbers_are_fresh_and_repeatable(random: Path, device: str) -> None:
    checks.check_random(random, device)


def test_dead_memory_may_hold_anything(stateful: Path) -> None:
    network = running().cuda()
    with cgbundle.load(stateful) as program, torch.no_grad():
        for round_, batch in enumerate(checks.ORDER):
            (x,) = draw(rows, batch, round_, "cuda")
            program.poison(self_test.POISON)
            for got, want in zip(program(x), network(x), strict=True):
                checks.near(got, want)


class Swapping(torch.nn.Module):
    """Buffers that swap their values, one through an addition of zero; and the maximum of a row, computed in parts."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate("abcd"):
            self.register_buffer(name, torch.full((4,), float(number)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, c, d = [tensor.clone() for tensor in (self.a, self.b, self.c, self.d)]
        for place, value in zip((self.a, self.b, self.c, self.d), (b, a, d + 0, c), strict=True):
            place.copy_(value)
        return torch.stack([self.a, self.b, self.c, self.d]) + x[:, :4], x.argmax(-1)


def test_buffers_are_swapped_and_the_largest_is_found(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    path = cgcompile.build(Swapping(), lambda: (torch.zeros(4, 20000),), out=tmp_path / "swapping.cgb", target="cuda").path
    eager = Swapping().cuda()
    with cgbundle.load(path) as program:
        for number in range(4):
            x = torch.randint(0, 900, (4, 20000), generator=generator).float().cuda()  # has equal maxima: the first counts
            x[number, [5000, 15000]] = float("nan")
            for got, want in zip(program(x), eager(x), strict=True):
                assert torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0))
