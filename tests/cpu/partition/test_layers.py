"""A program is split into its layers; layers that are equal except for weights are found."""

from __future__ import annotations

import operator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from cgcompile.partition.blocks import Straight, blocks, straight_module, taken
from cgcompile.partition.layers import MANY, best_cut, form, has_equal_layers, pieces


class Layer(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


def graph(model: nn.Module) -> torch.fx.GraphModule:
    return torch.export.export(model, (torch.randn(2, 4),), strict=False).graph_module


def sizes(model: nn.Module) -> list[int]:
    """Returns the number of operations of every piece (the part between two cuts)."""
    nodes = [node for node in graph(model).graph.nodes if node.op == "call_function"]
    cut = pieces(nodes)
    assert [node for piece in cut for node in piece] == nodes
    return [len(piece) for piece in cut]


def layers(count: int, activation: type[nn.Module] = nn.Tanh) -> list[nn.Module]:
    return [Layer(activation()) for _ in range(count)]


class Around(nn.Module):
    """A model with an operation before its layers and one after them."""

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


class Attending(nn.Module):
    """A layer of a transformer: a norm, attention, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.out = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.norm(x))[:, None]
        attended = nn.functional.scaled_dot_product_attention(q, q, q)
        return x + self.out(attended.flatten(1))


def test_layers_are_cut_where_no_kernel_is() -> None:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.exp() @ x.T).tanh() @ x

    for model, together in (
        (Around([Attending() for _ in range(MANY)]), ["add", "layer_norm"]),
        (
            Around([Spread() for _ in range(MANY)]),
            ["matmul", "tanh"],
        ),
    ):
        nodes = [node for node in graph(model).graph.nodes if node.op == "call_function"]
        cut = pieces(nodes)
        assert [node for piece in cut for node in piece] == nodes and len(cut) == MANY + 1
        (names,) = {tuple([str(node.target).split(".")[1] for node in piece]) for piece in cut[1:-1]}
        assert together in [list(pair) for pair in pairwise(names)]


@torch.library.custom_op("cgcompile_test_layers::mix", mutates_args=())
def mix(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces attention that has its own kernel and also returns the sums of its weights."""
    return query + key, query.sum(1)


@mix.register_fake
def _(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(len(query))


class Pair(nn.Module):
    """A layer with an operator that returns a tuple, after which a cut is cheapest."""

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = torch.ops.cgcompile_test_layers.mix(x.sin(), x.cos())
        return mixed.cos()


def test_no_tuple_crosses_a_cut() -> None:
    nodes = [node for node in graph(Around([Pair() for _ in range(MANY)])).graph.nodes if node.op == "call_function"]
    cut = pieces(nodes)
    assert len(cut) > MANY and sorted(node.name for part in cut for node in part) == sorted(node.name for node in nodes)
    elements = [node for node in nodes if node.target is operator.getitem]
    assert elements
    for node in elements:
        (part,) = [part for part in cut if node in part]
        assert node.args[0] in part[: part.index(node)]


def test_a_cut_between_operations_of_one_kernel_costs_more_than_any_number_of_values() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c = (x @ (x.T * number) for number in (1, 2, 3))
            return (a.tanh() * b.tanh() * c.tanh()) @ x

    nodes = [node for node in graph(Around([Wide() for _ in range(3)])).graph.nodes if node.op == "call_function"]
    size = (len(nodes) - 2) // 3
    layers = [nodes[1 + size * number : 1 + size * (number + 1)] for number in range(3)]
    at = best_cut(layers)
    assert "mul" in str(layers[1][at - 1].target) and "matmul" in str(layers[1][at].target)


def test_complex_numbers_stay_in_one_part() -> None:
    class Turning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(x.reshape(2, 2, 2)) * 1j).reshape(2, 4)

    assert has_equal_layers(graph(Around(layers(MANY)))) and not has_equal_layers(graph(Around(layers(MANY - 1))))
    assert not has_equal_layers(graph(Around([Turning() for _ in range(MANY)])))


@pytest.mark.parametrize("name", ["index_select", "_unsafe_index_put"])
def test_every_layer_computes_the_indices_that_it_uses(name: str) -> None:
    class Gathering(nn.Module):
        def forward(self, x: Tensor, places: Tensor, scale: Tensor) -> Tensor:
            if name == "index_select":
                return x.index_select(1, places) * scale
            return torch.ops.aten._unsafe_index_put(x, [None, places], x.sin()) * scale

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
    parts = [[str(node.target).split(".")[1] for node in piece] for piece in pieces(nodes)]
    assert len(parts) > MANY and all(part[:2] == ["arange", "clamp"] for part in parts if name in part)
    assert sum(part.count("sum") for part in parts) == 1, "only indices are computed again"


def test_no_operations_are_one_empty_piece() -> None:
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
