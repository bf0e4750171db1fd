"""State, mutated inputs and random numbers in bundles with host regions beside graphs, with both recorders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgcompile  # noqa: E402
from cgbundle.format import archive  # noqa: E402
from tests.gpu.helpers.self_tests import passed  # noqa: E402
from tests.helpers.models import state_checks as checks  # noqa: E402
from tests.helpers.models.state_models import SIZES, Between, HostDraws, between, singles  # noqa: E402


def built(model: Any, inputs: Any, folder: Path, recorder: str) -> Path:
    """Builds a bundle and returns its path. The build does not interpret a cross-compiled bundle, because the tests replay it."""
    sizes, path, prove = list(SIZES), folder / "host.cgb", "none" if recorder == "cross-compile" else "interpret"
    return cgcompile.build(model.eval(), inputs, sizes=sizes, out=path, target="cuda", record=recorder, prove=prove).path


@pytest.fixture(scope="module", params=["cross-compile", "capture"])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(Between(), between, tmp_path_factory.mktemp("between"), request.param)


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_state_and_written_inputs_beside_host_regions(cut: Path, device: str, mode: str) -> None:
    assert any(region.kind == "host" for region in archive.read_manifest(str(cut)).regions)
    for outputs in ("copy", "view"):
        checks.check_between(cut, device, mode, outputs)


def test_the_self_test_beside_host_regions_passes_without_torch(cut: Path) -> None:
    passed(cut)


@pytest.mark.parametrize("recorder", ["cross-compile", "capture"])
def test_random_numbers_beside_host_regions(tmp_path: Path, recorder: str) -> None:
    path = built(HostDraws(), singles, tmp_path, recorder)
    checks.check_random(path, "cuda")
    passed(path)
