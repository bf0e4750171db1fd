"""Which line is called the user's: one of the model's, and never a line of whoever called the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from typer.testing import CliRunner

import cgcompile
from cgcompile_cli.main import app

LAYERS = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()

def inputs(batch: int):
    return torch.randn(batch, 4)
"""


def test_the_command_is_no_line_of_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.py").write_text(LAYERS)
    told = CliRunner().invoke(app, ["check", "layers.py", "--sizes", "1,2", "--train", "--quiet"], prog_name="cgcompile")
    assert told.exit_code == 0 and "note random-operation\n" in told.stdout, "layers of a library have no line of the user's"
    assert "check.py" not in told.stdout and "typer" not in told.stdout


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


def test_a_script_is_called_by_its_model_alone() -> None:
    def inputs(batch: int) -> torch.Tensor:
        return torch.randn(batch, 4)

    found = {}
    for name, model in (("own", Dropping()), ("library", nn.Dropout(0.5))):
        report = cgcompile.check(model, inputs, sizes=[1, 2], train=True)
        (found[name],) = [finding.where for finding in report.findings if finding.rule == "random-operation"]
    line = Dropping.forward.__code__.co_firstlineno + 1
    assert found["own"].endswith(f"test_user_code.py:{line}") and found["library"] == ""
