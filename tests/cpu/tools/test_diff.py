"""`cgcompile diff` of real builds: two equal builds do not differ, and one changed weight is the only difference."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import cgcompile
from cgcompile.targets.cpu import object_cache
from cgcompile.tools.diff.bundle_files import open_bundle
from cgcompile.tools.diff.compare import compare
from cgcompile_cli import main
from tests.cpu.conftest import MODEL

EDIT = """
        made[0].weight.data[3, 2] += 1
        return made
"""
"""One of 96 weights of the first layer: Inductor inlines constants of up to 8 elements, such as the last bias."""


def build(folder: Path, source: str) -> Path:
    """Builds the model of this source, for batch 1 and 4, from a new file."""
    folder.mkdir()
    (folder / "tiny.py").write_text(source)
    return cgcompile.build(str(folder / "tiny.py"), sizes=[1, 4], out=folder / "tiny.cgb", target="cpu").path


def test_two_builds_of_one_model_do_not_differ(bundle: Path, rebuilt: Path) -> None:
    result = CliRunner().invoke(main.app, ["diff", str(bundle), str(rebuilt)], prog_name="cgcompile")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "no difference\n", "")


LOOKUP = """
import torch
from torch import nn


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum(1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Lookup().eval()


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 11, (batch, 5)),)
"""
"""A model whose compiled code checks its indices and names its generated file."""


def test_two_builds_of_a_model_that_checks_indices_do_not_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = build(tmp_path / "one", LOOKUP)
    monkeypatch.setattr(object_cache, "recall", lambda path, kind: None)
    other = build(tmp_path / "other", LOOKUP)
    assert compare(open_bundle(str(one)), open_bundle(str(other))) == ()
    assert b".kernel.cpp" in (one / "host" / "model.so").read_bytes(), "or the test would show nothing"


def test_one_changed_weight_is_what_differs(bundle: Path, tmp_path: Path) -> None:
    changed = MODEL.replace("        return nn.Sequential(", "        made = nn.Sequential(").replace(
        ".eval()\n", ".eval()\n" + EDIT
    )
    rows = compare(open_bundle(str(bundle)), open_bundle(str(build(tmp_path / "changed", changed))))
    first, *others = rows
    assert (first.part, first.name, first.note) == ("weights", "0.weight", "1 of 96 elements differ (float32)")
    assert {row.part for row in others} == {"self-test"}, "and what the model gives with it"
    tensors = {row.name for row in others if "/" in row.name}
    assert tensors and tensors <= {"1/output/0", "4/output/0"}, "the same inputs; a unit that is 0 may hide the change"
