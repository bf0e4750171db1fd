"""Wrappers around modules are removed with a note; torch.jit modules contain no Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.errors import ModelError
from cgcompile.model.load import load_source


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x)
        return output


class Holder(nn.Module):
    """Wrapped and scripted modules inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(Block())
        self.compiled, self.parallel = torch.compile(Block()), nn.DataParallel(Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.scripted(x) + self.compiled(x) * self.parallel(x)
        return output


def rows(batch: int) -> torch.Tensor:
    return torch.rand(batch, 4)


def test_wrappers_inside_of_a_model_are_taken_off_a_copy() -> None:
    model = Holder()
    report = cgcompile.check(model, rows, sizes=[1, 4], target="cpu")
    assert [(finding.rule, finding.message) for finding in report.findings] == [
        ("wrapped-module", "compiled is wrapped by torch.compile"),
        ("wrapped-module", "parallel is wrapped by DataParallel"),
    ]
    source = load_source(model, rows)
    assert sorted(dict(source.model.named_parameters())) == [
        f"{part}.linear.{leaf}" for part in ("compiled", "parallel", "scripted") for leaf in ("bias", "weight")
    ]
    assert isinstance(model.parallel, nn.DataParallel) and source.model.parallel is model.parallel.module


def test_a_loaded_module_of_torch_jit_inside_of_a_model_has_parameters(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Block()), tmp_path / "block.pt")

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.jit.load(tmp_path / "block.pt")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.block(x).relu()
            return output

    model = Around().eval()
    before = model.block.linear.weight
    report = cgcompile.check(model, rows, sizes=[1, 4], target="cpu")
    assert report.findings == () and model.block.linear.weight.data_ptr() == before.data_ptr()


class Hiding(nn.Module):
    """Its layers are in a plain list. A child module with the same weights has the name of a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [[nn.Linear(4, 4)]]
        self.parameters = nn.ParameterList(self.layers[0][0].parameters())  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers[0][0](x)
        return output


def test_a_child_that_a_method_hides_gets_another_name() -> None:
    model = Hiding()
    report = cgcompile.check(model, rows, sizes=[1, 4], target="cpu")
    assert [finding.message for finding in report.findings] == [
        "parameters is hidden by the method of that name, and is called parameters_"
    ]
    assert sorted(dict(load_source(model, rows).model.named_parameters())) == ["parameters_.0", "parameters_.1"]
    assert list(model._modules) == ["parameters"]


def test_a_module_that_is_there_twice_stays_one() -> None:
    inner = nn.DataParallel(Block())
    source = load_source(nn.Sequential(inner, nn.Sequential(inner)), rows)
    assert source.model[0] is source.model[1][0] is inner.module and len(source.notes) == 1


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_a_wrapped_model_is_what_it_wraps(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Block()
    source = load_source(wrap(model), rows)
    assert source.model is model and source.notes


def test_a_model_without_wrappers_stays_itself() -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block()))
    source = load_source(model, rows)
    assert source.model is model and source.notes == ()


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.rand(1, 4))])
def test_a_model_of_torch_jit_is_refused_in_one_line(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"Module of torch.jit, which has no Python code") as caught:
        load_source(make(Block()), rows)
    assert caught.value.code == "source-invalid" and "scripted or traced" in caught.value.hint
