"""Golden GPU bundles of every version replay their self-test on a GPU of their architecture: captured ones bit for bit,
cross-compiled ones within the tolerance of eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

import cgbundle
from cgbundle import self_test
from cgbundle.errors import MachineError
from cgbundle.format import archive
from tests.helpers.places import GOLDEN

GOLDENS = sorted((GOLDEN).glob("v*/*.cgb"))
FOR_A_GPU = [path for path in GOLDENS if archive.read_manifest(str(path)).target.kind == "cuda"]


@pytest.fixture(params=FOR_A_GPU, ids=lambda path: f"{path.parent.name}/{path.stem}")
def golden(request: pytest.FixtureRequest) -> Path:
    """Skips the test if this machine cannot run the bundle."""
    path: Path = request.param
    try:
        cgbundle.load(path).close()
    except MachineError as error:
        pytest.skip(str(error))
    return path


def test_the_self_test_has_the_recorded_bits(golden: Path) -> None:
    answer = self_test.fresh(str(golden))
    assert "error" not in answer, answer
    assert all(row["passed"] for row in answer["results"]) and not answer["torch_imported"]


def test_stream_mode_has_the_recorded_bits(golden: Path) -> None:
    with cgbundle.load(golden, mode="stream") as program:
        compare = program.manifest.entries[0].self_test.compare
        assert all(result.passed(compare) for result in self_test.replay_self_test(program))
