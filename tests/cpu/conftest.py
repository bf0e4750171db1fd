"""One tiny bundle for all tests of this folder, built twice, because compiling takes ten seconds."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.bundles.shared_builds import shared_build

with suppress(ImportError):  # a machine with a GPU may only have torch and pytest
    from hypothesis import HealthCheck, settings

    # no deadline, because the machine may be busy
    settings.register_profile("cpu", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("cpu")

MODEL = """
import torch
from torch import nn


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 6),)
"""
"""An MLP with two layers, whose rows are independent."""


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the source file of the tiny model."""
    path = tmp_path_factory.mktemp("model") / "tiny.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="session")
def bundle() -> Path:
    """Returns the tiny model's bundle for batch 1 and 4. Copy it before you change a file."""
    return _built("bundle")


@pytest.fixture(scope="session")
def rebuilt() -> Path:
    """Returns the same bundle, compiled again in another folder."""
    pytest.importorskip("torch")
    from cgcompile.targets.cpu import object_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_cache, "recall", lambda path, kind: None)
        return _built("rebuilt")


def _built(name: str) -> Path:
    pytest.importorskip("torch")
    import cgcompile

    def build(folder: Path) -> None:
        (folder / "tiny.py").write_text(MODEL)
        cgcompile.build(str(folder / "tiny.py"), sizes=[1, 4], out=folder / "tiny.cgb", target="cpu")

    return shared_build(name, build) / "tiny.cgb"
