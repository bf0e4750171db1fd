"""A build tries a model with changed inputs. Indices stay in the range of the examples, and an index out of range raises IndexError
on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.devices import index_guard
from cgcompile.model.devices.index_guard import IndexGuard, guarded_indices
from cgcompile.model.load import load_source
from cgcompile.transforms.padding import proof
from cgcompile.transforms.prepared import prepare

x, table = torch.rand(3, 4), torch.rand(5, 4)
wrong = torch.tensor([0, 9, 1])
plane = wrong.view(3, 1)

OUT_OF_RANGE: dict[str, Callable[[], Any]] = {
    "index": lambda: table[wrong],
    "two indices": lambda: table[torch.tensor([0]), torch.tensor([4])],
    "from the end": lambda: table[torch.tensor([-6])],
    "index_put": lambda: table.clone().index_put_((wrong,), torch.ones(4)),
    "embedding": lambda: F.embedding(wrong, table),
    "embedding_bag": lambda: F.embedding_bag(wrong.view(1, 3), table),
    "gather": lambda: x.gather(1, plane),
    "scatter": lambda: x.scatter(1, plane, x),
    "scatter_add": lambda: x.scatter_add(1, plane, x),
    "scatter_reduce": lambda: x.scatter_reduce(1, plane, x, "amax"),
    "index_select": lambda: table.index_select(0, wrong),
    "index_add": lambda: table.index_add(0, wrong, x),
    "index_copy": lambda: table.index_copy(0, wrong, x),
    "index_fill": lambda: table.index_fill(0, wrong, 1.0),
    "take": lambda: x.take(torch.tensor([12])),
    "classes": lambda: F.cross_entropy(x, wrong),
    "classes of pictures": lambda: F.cross_entropy(torch.rand(1, 4, 3, 1), wrong.view(1, 3, 1)),
    "unpool": lambda: F.max_unpool2d(torch.rand(1, 1, 1, 1), torch.full((1, 1, 1, 1), 9), 2),
}

IN_RANGE: dict[str, Callable[[], Any]] = {
    "a mask": lambda: table[table[:, 0] > 0.5],
    "a slice and an index": lambda: table[:, torch.tensor([3])],
    "from the end": lambda: table[torch.tensor([-5])],
    "ignored classes": lambda: F.cross_entropy(x, torch.tensor([0, -100, 3])),
    "nothing": lambda: F.embedding(wrong[:0], table),
    "a number": lambda: torch.rand(()).gather(0, torch.tensor(0)),
    "a conditional": lambda: torch.cond(torch.tensor(True), lambda y: y + 1, lambda y: y - 1, (x,)),
    "a loop": lambda: torch.while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * 2), (torch.tensor(0), x)),
    "attention that compiles itself": lambda: flex_attention(*[x.view(1, 1, 3, 4)] * 3, score_mod=lambda s, *at: s + at[-1]),
}


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_an_index_out_of_range_is_refused_before_the_operator_runs(kind: str) -> None:
    with IndexGuard(), torch.no_grad(), pytest.raises(IndexError, match=r"an index is out of range, expected"):
        OUT_OF_RANGE[kind]()


@pytest.mark.parametrize("kind", IN_RANGE)
def test_what_is_in_range_passes(kind: str) -> None:
    torch.manual_seed(0)
    wanted = IN_RANGE[kind]()
    torch.manual_seed(0)
    with IndexGuard(), torch.no_grad():
        torch.testing.assert_close(IN_RANGE[kind](), wanted)
    torch.manual_seed(0)
    torch.testing.assert_close(IN_RANGE[kind](), wanted)  # a refused operator leaves no side effect


class GraphNetwork(nn.Module):
    """Sums the messages of edges at their nodes."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.line, self.first = nn.Linear(4, 4), first

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0] - self.first, edges[1] - self.first
        return torch.zeros_like(nodes).index_add(0, target, self.line(nodes)[source])


def graph(nodes: int, edges: int) -> tuple[torch.Tensor, ...]:
    return torch.rand(nodes, 4), torch.randint(0, nodes, (2, edges))


def counted_from_one(nodes: int, edges: int) -> tuple[torch.Tensor, ...]:
    return torch.rand(nodes, 4), torch.randint(1, nodes + 1, (2, edges))


class Labels(nn.Module):
    """Integers that are indices of classes, words and edges."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.words(ids)
        rows = torch.arange(ids.shape[0], device=ids.device)
        return F.cross_entropy(scores, labels, reduction="none") + scores[rows, labels] + F.one_hot(labels, 4)[:, 0]


def labelled(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(3, 9, (batch,)), torch.randint(0, 4, (batch,))


TRIED = [
    (Labels(), labelled, 0),
    (GraphNetwork(), graph, 1),  # the trial has fewer nodes, but all edges
    (GraphNetwork(1), counted_from_one, 3),  # zeros as edges, which padding gives
]


@pytest.mark.parametrize(("model", "inputs", "most"), TRIED)
def test_an_index_of_a_trial_ends_no_build(
    model: nn.Module, inputs: Callable[..., Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU an index out of range would break the context: it is refused before the operator runs, and few trials have one."""
    refused: list[str] = []
    checked = index_guard._check

    def noted(*arguments: Any) -> None:
        try:
            checked(*arguments)
        except IndexError as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(index_guard, "_check", noted)
    monkeypatch.setattr(proof, "guarded_indices", lambda device: IndexGuard())
    source = load_source(model.eval(), inputs)
    sizes = {name: (4, 6) for name in source.dimensions}
    exported = export(source, sizes)
    functionalized = {key: functional(program) for key, program in exported.programs.distinct}
    prepared = prepare(exported, describe_signature(exported), functionalized, markers=False)
    proved_dimensions = proof.prove_padding(prepared, lambda text: None)
    assert [dimension.name for dimension in proved_dimensions] == list(sizes)
    assert len(refused) <= most
    assert [dimension.chunk for dimension in proved_dimensions] == [not most] * len(proved_dimensions), proved_dimensions


def test_a_trace_with_sizes_that_vary_has_no_values_to_ask() -> None:
    dynamic = export(load_source(Labels().eval(), labelled), {"batch": (4, 6)}).programs.first
    with IndexGuard():
        assert dynamic.run_decompositions({}).graph.nodes


def test_the_cpu_asks_itself() -> None:
    with guarded_indices(torch.device("cpu")), pytest.raises(IndexError, match="out of range in self"):
        F.embedding(wrong, table)
