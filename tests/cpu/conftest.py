"""One tiny bundle for all tests of this folder: compiling takes half a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

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
"""A perceptron of two layers whose rows are independent."""


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the tiny model."""
    path = tmp_path_factory.mktemp("model") / "tiny.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="session")
def bundle(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's bundle for batch 1 and 4.  Copy it before changing a file."""
    pytest.importorskip("torch")
    import cgcompile

    out = tmp_path_factory.mktemp("bundle") / "tiny.cgb"
    return cgcompile.build(str(model_file), sizes=[1, 4], out=out, target="cpu").path
