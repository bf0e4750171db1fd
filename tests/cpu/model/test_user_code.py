"""Errors name a line of the model as the user's line, never a line of the code that called the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from typer.testing import CliRunner

import cgcompile
from cgcompile.model.user_code import place, shown, whole
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
    result = CliRunner().invoke(app, ["check", "layers.py", "--sizes", "1,2", "--train", "--quiet"], prog_name="cgcompile")
    assert result.exit_code == 0 and "note random-operation\n" in result.stdout, "layers of a library have no line of the user's"
    assert "check.py" not in result.stdout and "typer" not in result.stdout


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


def test_a_script_is_called_by_its_model_alone() -> None:
    def inputs(batch: int) -> torch.Tensor:
        return torch.randn(batch, 4)

    locations = {}
    for name, model in (("own", Dropping()), ("library", nn.Dropout(0.5))):
        report = cgcompile.check(model, inputs, sizes=[1, 2], train=True)
        (locations[name],) = [finding.where for finding in report.findings if finding.rule == "random-operation"]
    line = Dropping.forward.__code__.co_firstlineno + 1
    assert locations["own"].endswith(f"test_user_code.py:{line}") and locations["library"] == ""


@pytest.mark.parametrize(
    "home", ["/usr/lib/python3.11/site-packages", "/tmp/v/lib64/python3.12/site-packages", "/usr/lib/python3/dist-packages"]
)
def test_a_file_of_an_installed_package_is_the_same_in_every_environment(home: str) -> None:
    assert shown(f"{home}/transformers/models/bert/modeling_bert.py") == "transformers/models/bert/modeling_bert.py"
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{home}/transformers/x.py", line 7, in forward\n    y = attention(query[0], [key,'
    assert place(node) == ("transformers/x.py:7", "y = attention(query[0], [key,...])")


def test_code_that_goes_on_is_cut_with_dots() -> None:
    assert whole("y = f(") == "y = f(...)"
    assert whole("y = f(x[1])  # see (1") == "y = f(x[1])  # see (1"
    assert whole("y = f('(')") == "y = f('(')" and whole(").sum()") == ").sum()"
