"""Splits a program into its layers, and finds layers that are equal except for weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cgcompile.partition.blocks import Straight, blocks, straight_module, taken
from cgcompile.partition.layers import MANY, form, pieces


class Layer(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


def graph(model: nn.Module) -> torch.fx.GraphModule:
    return torch.export.export(model, (torch.randn(2, 4),), strict=False).graph_module


def sizes(model: nn.Module) -> list[int]:
    """Returns the number of operations of every piece."""
    nodes = [node for node in graph(model).graph.nodes if node.op == "call_function"]
    cut = pieces(nodes)
    assert [node for piece in cut for node in piece] == nodes
    return [len(piece) for piece in cut]


def layers(count: int, activation: type[nn.Module] = nn.Tanh) -> list[nn.Module]:
    return [Layer(activation()) for _ in range(count)]


class Around(nn.Module):
    """Layers between two operations of the model itself."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        for layer in self.layers:
            x = layer(x)
        return x * 2


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Around(layers(MANY)), [1, *[2] * MANY, 1]),
        (Around(layers(MANY - 1)), [2 * MANY]),
        (Around([*layers(MANY), *layers(2, nn.Softsign), *layers(MANY)]), [1, *[2] * MANY, 8, *[2] * MANY, 1]),
        (nn.Sequential(*layers(MANY)), [2] * MANY),
        (nn.Sequential(nn.Sequential(*layers(2)), nn.Sequential(*layers(2))), [8]),
        (nn.Tanh(), [1]),
    ],
)
def test_a_run_of_many_equal_layers_is_cut(model: nn.Module, expected: list[int]) -> None:
    assert sizes(model) == expected


def test_every_layer_computes_the_indices_that_it_uses() -> None:
    class Gathering(nn.Module):
        def forward(self, x: Tensor, places: Tensor, scale: Tensor) -> Tensor:
            return x.index_select(1, places) * scale

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Gathering() for _ in range(MANY)])

        def forward(self, x: Tensor) -> Tensor:
            places, scale = torch.arange(4).clamp(max=2), x.sum()
            for layer in self.layers:
                x = layer(x, places, scale)
            return x

    nodes = [node for node in graph(Shared()).graph.nodes if node.op == "call_function"]
    first, *others = [[str(node.target).split(".")[1] for node in piece] for piece in pieces(nodes)]
    assert first == ["arange", "clamp", "sum"]
    assert others == [["arange", "clamp", "index_select", "mul"]] * MANY


def test_nothing_has_one_piece() -> None:
    assert pieces([]) == [[]]


def test_the_form_of_equal_layers_is_equal() -> None:
    block = blocks(graph(Around([*layers(MANY), *layers(MANY, nn.Sigmoid)])), layers=True)
    forms = []
    for part in block.parts:
        assert isinstance(part, Straight)
        module = straight_module(block, part, part.outputs)
        forms.append(form(module, dict.fromkeys(taken(module), "a tensor")))
    _, *first_forms, last = forms[: MANY + 2]
    assert len(set(forms)) == 4 and len(set(first_forms)) == 1 and last not in first_forms


def test_a_number_among_the_arguments_counts() -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() * self.by

    forms = set()
    for by in (2.0, 3.0, 2.0):
        module = graph(Scaled(by))
        block = blocks(module)
        (part,) = block.parts
        assert isinstance(part, Straight)
        straight = straight_module(block, part, [operand for operand in block.outputs if isinstance(operand, str)])
        forms.add(form(straight, dict.fromkeys(taken(straight), "a tensor")))
    assert len(forms) == 2
