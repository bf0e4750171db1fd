"""A finding in an installed package also names the line of the user that called it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.errors import ModelError
from cgcompile.export.export import export, refuse_branches
from cgcompile.model.load import load_source
from cgcompile.model.user_code import can_be_asked

LIBRARY = """
import torch

def pick(x):
    return x[x[:, 0] > 0]

def mixed(x):
    return x + x.cpu()

def halved(x):
    while x.sum() > 1:
        x = x / 2
    return x
"""


def installed(folder: Path) -> ModuleType:
    file = folder / "site-packages" / "strangers" / "parts.py"
    file.parent.mkdir(parents=True)
    file.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("strangers_parts", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_in_a_library_comes_with_the_line_that_called_it(tmp_path: Path) -> None:
    library = installed(tmp_path)

    class Caller(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            picked: torch.Tensor = library.pick(x).sum()
            return picked + library.mixed(x).sum()

    report = cgcompile.check(Caller(), lambda batch: torch.rand(batch, 4), sizes=[2, 4], target="sm_90")
    locations = {
        (finding.rule, finding.where, finding.message.partition(", called from ")[2])
        for finding in report.findings
        if "copy" not in finding.rule
    }
    assert locations == {
        ("several-devices", "strangers/parts.py:8", "tests/cpu/model/test_user_lines.py:52"),
        ("data-dependent-shape", "strangers/parts.py:5", "tests/cpu/model/test_user_lines.py:51"),
    }


def test_a_branch_in_a_library_names_both_lines(tmp_path: Path) -> None:
    library = installed(tmp_path)

    class Caller(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = library.halved(x)
            return output

    with pytest.raises(ModelError, match=r"strangers/parts\.py:11: .*, called from tests/cpu/model/test_user_lines\.py:\d+: "):
        refuse_branches(export(load_source(Caller(), lambda batch: torch.rand(batch, 4)), {"batch": (2, 4)}))


def test_an_object_that_raises_anything_cannot_be_asked() -> None:
    class Ended(BaseException):
        pass

    class Odd:
        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            raise Ended

    assert not can_be_asked(Odd()) and can_be_asked(object())
