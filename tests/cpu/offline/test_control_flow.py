"""Branches and loops without a GPU: lowered as conditional nodes, interpreted on data that takes every way, against eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cgbundle.tables.recording import ConditionalNode, Recording
from cgcompile.export.higher_order.conditionals import obstacle
from cgcompile.offline.interpret.interpret import Stage, interpret
from tests.cpu.offline.test_interpret_lowered import task_of
from tests.cpu.offline.written_rows import tensor_of

ZERO = torch.zeros((), dtype=torch.int64)


class Nested(nn.Module):
    """A loop with a branch in it inside of a branch; the other side is a branch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)

        def deep(h: Tensor) -> Tensor:
            def turn(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, torch.cond(v.sum() > 40, lambda v: self.second(v) - 1, lambda v: v * 1.5, (v,))

            turns, v = torch.while_loop(lambda i, v: (i < 6) & (v.abs().max() < 30), turn, (torch.zeros_like(ZERO), h))
            return v + turns

        def flat(h: Tensor) -> Tensor:
            return torch.cond(h.mean() > -1, lambda h: h.sin(), lambda h: self.second(h).relu(), (h,))

        y = torch.cond(h.sum() > 0, deep, flat, (h,))
        return y @ h.T, h.sum()


class Carried(nn.Module):
    """What is carried changes places, is looked at from another side, or stays; branches hand on what they are given."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def turn(i: Tensor, a: Tensor, b: Tensor, square: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
            return i + 1, b.clone(), a + b, square.T.contiguous(), kept.clone()

        n = (x[0, 0] * 4).to(torch.int64)
        first = (torch.zeros_like(ZERO), x, x + 1, x[:, :3] * 1, x.sum(0))
        i, a, b, square, kept = torch.while_loop(lambda i, *rest: i < n, turn, first)
        c, d = torch.cond(a.sum() > b.mean(), lambda a, b: (b.clone(), a * 1), lambda a, b: (a.clone(), b[:, :4].clone()), (a, b))
        return i, a, b, square, kept, c, d[1:]


def inputs(*scales: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, 4, generator=generator).abs() * scale for scale in scales]


def shifted() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(4, 16, generator=generator) * scale + shift for scale, shift in ((1, 1), (1, -1), (3, 4), (9, -6), (0.1, 0))
    ]


CASES: dict[str, tuple[Callable[[], nn.Module], list[Tensor], list[str]]] = {
    "nested": (Nested, shifted(), ["if", "while", "if", "if"]),
    "carried": (Carried, inputs(0.1, 1, 3, 0), ["while", "if"]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_way_is_eagers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    make, given, kinds = CASES[name]
    model = make().eval()
    with torch.no_grad():
        program = torch.export.export(model, (given[0],), strict=False)
        expected = [model(x) for x in given]
    assert len({tuple(map(float, [leaf.sum() for leaf in each])) for each in expected}) == len(given)
    task = task_of(program, given[0], given, tmp_path)
    (recording,) = set(task.recordings)
    assert sorted(types(recording)) == sorted(kinds)
    (outcome,) = interpret([task], tmp_path, budget=1)
    read = iter(outcome.read)
    for stage, wanted in zip(task.stages, expected, strict=True):
        check(stage, wanted, [next(read) for _ in wanted])


def types(recording: Recording) -> list[str]:
    return [node.type for node in recording.nodes if isinstance(node, ConditionalNode)]


def check(stage: Stage, wanted: Sequence[Tensor], contents: Sequence[bytes]) -> None:
    for value, want, found in zip(stage.read, wanted, contents, strict=True):
        got = tensor_of(found, value)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "data": (lambda x: torch.cond(x.sum() > 0, lambda x: x[x > 0].sum(), lambda x: x.sum(), (x,)), "depends on data"),
    "scan": (
        lambda x: torch.cond(
            x.sum() > 0,
            lambda x: torch._higher_order_ops.scan(lambda c, r: (c + r, r * 1), x[0] * 1, x)[1],
            lambda x: x * 1,
            (x,),
        ),
        "control flow of another kind inside it",
    ),
    "fine": (lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold(name: str) -> None:
    function, reason = REFUSED[name]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> object:
            return function(x)

    module = torch.export.export(Model(), (torch.randn(4, 6),), strict=False).graph_module
    (node,) = [node for node in module.graph.nodes if str(node.target) == "cond"]
    assert reason in obstacle(node, module) if reason else obstacle(node, module) == ""
