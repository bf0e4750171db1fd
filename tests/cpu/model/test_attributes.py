"""Attributes that a call assigns, and tensors that are not buffers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.checks import check
from cgcompile.export.export import export
from cgcompile.export.exported import Exported
from cgcompile.export.functionalization import functional
from cgcompile.model.flat_module import run_eager
from cgcompile.model.load import load_source, load_sources
from cgcompile.model.source import sample
from cgcompile.pipeline.build import export_entries


class Levels(nn.Module):
    """Every call creates the list again, as in torchvision's RAFT."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = [torch.tensor(0)]
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.levels = [self.linear(x)]
        for _ in range(2):
            self.levels.append(self.levels[-1] * 2)
        return sum(self.levels, torch.zeros(()))


class Longer(Levels):
    """The result depends on the old length of the list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = len(self.levels)
        self.levels = [*self.levels, x]
        return self.linear(x) * before


class Dictionary(Levels):
    """The same model, but it reads vars() instead of the attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = len(vars(self)["levels"])
        self.levels = [torch.tensor(0)] * (before + 1)
        return self.linear(x) * before


class Copied(Levels):
    """The same model, but it reads a copy of the module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = len(copy.copy(self).levels)
        self.levels = [torch.tensor(0)] * (before + 1)
        return self.linear(x) * before


class Present(Levels):
    """The result depends on whether the attribute exists."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = hasattr(self, "levels")
        if before:
            del self.levels
        else:
            self.levels = [x]
        return self.linear(x) * before


class Inner(nn.Module):
    """Wraps a module, so that it is not the outermost one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 4),)


def exported(model: nn.Module, **sizes: tuple[int, ...]) -> Exported:
    return export(load_source(model.eval(), rows), sizes or {"batch": (2, 4)})


def severities(traced: Exported) -> list[tuple[str, str]]:
    return [(finding.rule, finding.severity) for finding in check(traced).findings]


@pytest.mark.parametrize("model", [Levels(), Inner(Levels())])
def test_an_attribute_that_is_assigned_before_it_is_read_is_a_note(model: nn.Module) -> None:
    levels = next(module for module in model.modules() if isinstance(module, Levels))
    before = levels.levels
    traced = exported(model)
    assert severities(traced) == [("mutated-attribute", "note")]
    assert levels.levels is not before and not any(type(level) is not torch.Tensor for level in levels.levels)
    assert "__getattribute__" not in vars(Levels)
    tensors = sample(traced.source, {"batch": 2}).tensors
    torch.testing.assert_close(traced.programs.first.module()(*tensors), run_eager(traced.flat, tensors).outputs)


@pytest.mark.parametrize("model", [Longer(), Dictionary(), Copied(), Present()])
def test_an_attribute_that_is_read_before_is_refused(model: nn.Module) -> None:
    assert ("mutated-attribute", "refuse") in severities(exported(model))


class Spiking(nn.Module):
    """Stores a potential in a dict. `reset`: every call clears it first. `strange`: the old value is read for rare inputs."""

    def __init__(self, reset: bool, strange: bool = False) -> None:
        super().__init__()
        self.memories: dict[str, Any] = {"v": 0.0}
        self.reset, self.strange = reset, strange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old = self.memories["v"]
        if self.reset:
            self.memories["v"] = torch.zeros(1)
        for turn in range(3):
            self.memories["v"] = self.memories["v"] * 0.5 + x[0, turn]
        return torch.where(x > 1e9, old, x) if self.strange else (self.memories["v"] > 0) + x


class Sized(nn.Module):
    """A buffer whose size is the batch; with `reset`, every call fills it again."""

    def __init__(self, reset: bool) -> None:
        super().__init__()
        self.register_buffer("potential", torch.zeros(0), persistent=False)
        self.reset = reset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reset:
            self.potential = torch.zeros_like(self.potential)
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        self.potential = self.potential / 2 + x
        return self.potential * 2


@pytest.mark.parametrize("model", [Spiking(reset=True), Sized(reset=True)])
def test_tensors_in_an_attribute_that_no_result_depends_on_are_a_note(model: nn.Module) -> None:
    traced = exported(model)
    assert severities(traced) == [("mutated-attribute", "note")]
    assert not list(traced.source.model.buffers()), "they are no buffers afterwards"
    for size in (2, 4, 2):
        tensors = sample(traced.source, {"batch": size}).tensors
        torch.testing.assert_close(traced.programs.at((size,)).module()(*tensors), run_eager(traced.flat, tensors).outputs)


@pytest.mark.parametrize("model", [Spiking(reset=False), Spiking(reset=True, strange=True), Sized(reset=False)])
def test_tensors_in_an_attribute_that_a_result_depends_on_are_refused(model: nn.Module) -> None:
    assert ("mutated-attribute", "refuse") in severities(exported(model))


class Caches(nn.Module):
    """Calls write to a tensor in an object, to a plain attribute, and to `places` of a buffer, as transformers' cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Any = SimpleNamespace(layers=[SimpleNamespace(keys=torch.zeros(4))])
        self.plain = torch.zeros(4)
        self.register_buffer("seen", torch.zeros(4))
        self.places = {"seen": self.seen, "device": torch.device("cpu")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store.layers[0].keys.add_(x.sum(0))
        self.plain.copy_(x.sum(0))
        self.places["seen"].add_(1)
        return x + self.store.layers[0].keys + self.plain + self.seen + torch.ones(4, device=self.places["device"])


def test_tensors_that_are_no_buffers_are_state() -> None:
    traced = exported(Caches())
    assert sorted(functional(traced.programs.first).buffers_to_mutate.values()) == [
        "model.plain", "model.seen", "model.store_layers_0_keys",
    ]  # fmt: skip
    assert {rule for rule, _ in severities(traced)} == {"mutated-buffer"}
    (x,) = sample(traced.source, {"batch": 2}).tensors
    program, eager = traced.programs.first.module(), Caches()
    for _ in range(3):
        torch.testing.assert_close(program(x)[0], eager(x))


def test_the_model_is_afterwards_what_it_was() -> None:
    model = Caches()
    names, attributes = [name for name, _ in model.named_buffers()], set(vars(model))
    plain, keys = model.plain, model.store.layers[0].keys
    cgcompile.check(model, rows, sizes={"batch": (2, 4)})
    assert [name for name, _ in model.named_buffers()] == names and set(vars(model)) == attributes
    assert model.plain is plain and model.store.layers[0].keys is keys and model.places["seen"] is model.seen
    assert not any(tensor.any() for tensor in (plain, keys, model.seen)) and model.places["device"] == torch.device("cpu")


class Placed(nn.Module):
    """The module stores the device of the tensors that it creates, and `to()` does not change it, as in pyqtorch's circuits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._device = nn.Linear(4, 4), torch.device("cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4)
        state[0] = torch.tensor(1.0)
        return self.linear(x) * state.to(self._device)


@pytest.mark.parametrize("target", ["cuda", "sm_90"])
def test_a_module_that_keeps_the_cpu_as_its_device_is_told_the_gpu(target: str) -> None:
    model = Placed().eval()
    report = cgcompile.check(model, rows, sizes={"batch": (2, 4)}, target=target)
    assert not report.refused and [region.kind for region in report.regions] == ["graph"]
    assert model._device == torch.device("cpu")


class Memory(nn.Module):
    """One method writes what the other one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.store = [torch.zeros(4)]

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.store[0]

    def write(self, x: torch.Tensor) -> torch.Tensor:
        self.store[0].copy_(x.sum(0))
        return x * 2


def test_what_one_entry_writes_is_state_of_those_before_it_too() -> None:
    sources = load_sources(Memory(), {"read": rows, "write": rows})
    read, write = export_entries(sources, {"read": {"batch": (2, 4)}, "write": {"batch": (2, 4)}}, lambda text: None)
    assert read.programs.weights().keys() == write.programs.weights().keys() == {"model.store_0"}
    assert read.programs.weights()["model.store_0"] is write.programs.weights()["model.store_0"]


class Distribution:
    """Every call fills the object again, as in stable-baselines3."""

    def __init__(self) -> None:
        self.mean: Any = None
        self.calls = 0

    def of(self, mean: torch.Tensor) -> Distribution:
        self.mean = mean
        return self


class Policy(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.distribution, self.way = nn.Linear(4, 4), Distribution(), way
        self.distribution.mean = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = {
            "the part": lambda: self.distribution.mean, "all parts": lambda: vars(self.distribution)["mean"],
            "a copy": lambda: copy.copy(self.distribution).mean,
        }  # fmt: skip
        offset = before[self.way]() if self.way in before else torch.zeros(4)
        if self.way == "another object":
            self.distribution = Distribution()
        if self.way == "a count":
            self.distribution.calls += 1
        output: torch.Tensor = self.distribution.of(self.linear(x) + offset).mean
        return output


@pytest.mark.parametrize(
    ("way", "severity", "name"),
    [
        ("nothing", "note", "distribution.mean"), ("another object", "note", "distribution"),
        ("the part", "refuse", "distribution.mean"), ("all parts", "refuse", "distribution.mean"),
        ("a copy", "refuse", "distribution.mean"), ("a count", "refuse", "distribution.calls"),
    ],
)  # fmt: skip
def test_parts_of_an_object_are_attributes(way: str, severity: str, name: str) -> None:
    exported = export(load_source(Policy(way), lambda batch: torch.rand(batch, 4)), {"batch": (1, 4)})
    mutations = [finding for finding in check(exported).findings if finding.rule == "mutated-attribute"]
    assert (mutations[0].severity, mutations[0].message.split("'")[1]) == (severity, name)
    assert mutations[0].where.startswith("tests/cpu/model/test_attributes.py:")


class Cell(nn.Module):
    def __init__(self, start: Any) -> None:
        super().__init__()
        self.kept = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(x.mean(0) + self.kept) if isinstance(self.kept, torch.Tensor) else self.kept + 1
        return x + self.kept


class Listed(nn.Module):
    """torch does not know modules in a Python list or dict, as in the reservoirs of auto-esn."""

    def __init__(self, cells: Any) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.cells.values() if isinstance(self.cells, dict) else self.cells:
            x = cell(x)
        return x


@pytest.mark.parametrize(
    ("cells", "name"),
    [([Cell(torch.zeros(4))], "cells.0.kept"), ({"first": Cell(0)}, "cells.first.kept"), ((Cell(0),), "cells.0.kept")],
)
def test_what_modules_in_a_list_keep_is_refused_with_its_line(cells: Any, name: str) -> None:
    exported = export(load_source(Listed(cells), lambda batch: torch.rand(batch, 4)), {"batch": (1, 4)})
    (hit,) = [finding for finding in check(exported).findings if finding.rule == "mutated-attribute"]
    assert (hit.severity, hit.message.split("'")[1]) == ("refuse", name) and hit.source.startswith("self.kept = torch.tanh")
