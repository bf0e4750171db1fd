"""Nested branches that become the bodies of a switch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cgcompile.partition.blocks import Branch, Loop, Switch, blocks

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def first(i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    return x.sin()


def second(i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    return x * 2


def third(i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    return x - 1


def choose(at: Callable[[Tensor, Tensor], Tensor], true: Way, false: Way) -> Way:
    return lambda i, j, x: torch.cond(at(i, j), true, false, (i, j, x))


def equal(number: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda i, j: i == number


CHAINS: dict[str, tuple[Way, int]] = {
    "a chain": (choose(equal(0), first, choose(equal(5), second, third)), 3),
    "one longer": (choose(equal(0), first, choose(equal(5), second, choose(equal(-1), third, first))), 4),
    "two ways": (choose(equal(0), first, second), 0),
    "another value": (choose(equal(0), first, choose(lambda i, j: j == 1, second, third)), 0),
    "another comparison": (choose(equal(0), first, choose(lambda i, j: i > 1, second, third)), 0),
    "more than a branch": (choose(equal(0), first, lambda i, j, x: choose(equal(1), second, third)(i, j, x) + 1), 0),
    "the true side": (choose(equal(0), choose(equal(1), first, second), third), 0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_on_one_value_are_switches(name: str) -> None:
    way, bodies = CHAINS[name]

    class Model(nn.Module):
        def forward(self, i: Tensor, j: Tensor, x: Tensor) -> Tensor:
            return way(i, j, x)

    example_inputs = torch.tensor(0), torch.tensor(1), torch.randn(3)
    module = torch.export.export(Model(), example_inputs, strict=False).module(check_guards=False)
    before = str(module.graph)
    block = blocks(module)
    assert str(module.graph) == before, "what it was made of stays as it is"
    (part,) = [part for part in block.parts if isinstance(part, Branch | Switch | Loop)]
    assert (len(part.bodies) if isinstance(part, Switch) else 0) == bodies
    if isinstance(part, Switch):
        assert not any(isinstance(inner, Branch | Switch) for body in part.bodies for inner in body.parts)
