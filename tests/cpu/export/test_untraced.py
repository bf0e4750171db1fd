"""Models whose forward() calls autograd or nests vmap, and models whose hash is computed from attributes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from cgcompile.export.export import export
from cgcompile.export.higher_order import untraced
from cgcompile.model.load import load_source
from cgcompile.model.source import CPU
from tests.cpu.models import rows
from tests.helpers.raising import raises


class Potential(nn.Module):
    """An energy, and the forces as its derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x.requires_grad_()
            energy = self.net(x).sum(-1)
            return energy, -torch.autograd.grad(energy.sum(), x)[0]


class Residual(Potential):
    """A second derivative, as in physics-informed networks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return bend[:, 0] + slope[:, 1]


class OneStep(Potential):
    """Weights after one training step: the derivative by a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weight = self.net[0].weight
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.net(x).pow(2).mean(), weight)
        return x @ (weight - 0.1 * slope).T


class Adapted(Potential):
    """A copy of the network after one training step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        net = copy.deepcopy(self.net)
        weights = {name: weight.detach().requires_grad_() for name, weight in net.named_parameters()}
        with torch.enable_grad():
            slopes = torch.autograd.grad(functional_call(net, weights, (x,)).pow(2).mean(), list(weights.values()))
        adapted = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
        output: torch.Tensor = functional_call(net, adapted, (x,))
        return output


class Backward(Potential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            self.net(x).sum().backward()
        assert x.grad is not None
        return x.grad


class Ambient(Potential):
    """Uses the gradient mode of its caller."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x.requires_grad_()
        return torch.autograd.grad(self.net(x).sum(), x)[0]


class Mapped(Potential):
    """A product under two nested vmaps, as in state-space models with weights for each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weight = self.net[0].weight

        def row(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda pair: (weight[:, :2] * scale) @ pair)(values.view(2, 2))

        return torch.vmap(row)(x, x[:, 0])


class Functional(Potential):
    """Derivatives by torch.func: by the inputs, with vmap, and by a weight of the model."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        weights = dict(self.net.named_parameters())

        def energy(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return functional_call(self.net, weights, (row,)).sum()

        slopes = vmap(grad(energy, argnums=1), (None, 0))(weights, x)
        bends = vmap(jacrev(grad(energy, argnums=1), argnums=1), (None, 0))(weights, x)
        return slopes, bends, grad(lambda rows: self.net(rows).sum())(x), vjp(self.net, x)[1](x[:, :1])[0]


@pytest.mark.parametrize("kind", [Potential, Residual, OneStep, Mapped, Functional, Adapted])
def test_what_export_leaves_out_is_part_of_the_program(kind: type[nn.Module]) -> None:
    model = kind()
    programs = export(replace(load_source(model, rows), target_device=CPU), {"batch": (1, 8)}).programs
    assert programs.dynamic
    x = torch.rand(5, 4)
    expected = model(x.clone())
    got = programs.first.module()(x.clone())
    for want, have in zip(expected if isinstance(expected, tuple) else (expected,), got, strict=True):
        torch.testing.assert_close(have, want.detach())


def test_backward_is_refused_with_what_to_write_instead() -> None:
    with raises("export-differs", match=r"test_untraced.py:\d+: backward\(\) cannot be traced"):
        export(load_source(Backward(), rows), {"batch": (1, 8)})


def test_a_model_that_needs_gradients_is_told_how_to_turn_them_on() -> None:
    with raises("eager-failed", match=r"with torch.enable_grad\(\)"):
        export(load_source(Ambient(), rows), {"batch": (1, 8)})


class Circuit(Potential):
    """Its hash is computed from its children, as in libraries of quantum circuits; `asked` counts the computations."""

    asked = 0

    def __hash__(self) -> int:
        type(self).asked += 1
        return hash(self.net[0].in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        output: torch.Tensor = self.net(x)
        return output


def test_a_hash_is_computed_before_the_trace_and_not_while_attributes_are_read() -> None:
    outer, hash_method = nn.Sequential(Circuit()), Circuit.__hash__
    untraced.export(outer, (torch.rand(2, 4),), None)
    assert (
        Circuit.asked <= 3 and Circuit.__hash__ is hash_method
    )  # modules() computes the hash twice; before the fix, the trace computed it 31 times
    assert hash(outer[0]) == hash(4)
