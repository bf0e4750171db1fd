"""Branches that return an operand itself, such as `lambda y: y`. Branches and loops that receive one tensor twice (such as two sums
that start with the same zeros), or a tensor and its view."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cgbundle
import cgcompile
from cgcompile.export.export import export
from cgcompile.export.torch_program import SERIALIZER
from cgcompile.model.load import load_source
from cgcompile.offline.interpret.interpret import interpret
from tests.cpu.offline.test_control_flow import check
from tests.cpu.offline.test_interpret_lowered import task_of

NEWER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

newer = pytest.mark.skipif(not NEWER, reason="torch.cond of 2.11 refuses them, in eager PyTorch, too")

BRANCHES: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object]]] = {
    "itself": (lambda y: y * 2, lambda y: y),
    "a view": (lambda y: y.t() * 2, lambda y: y.t()),
    "both": (lambda y: (y, y * 2), lambda y: (y * 3, y)),
    "one twice": (lambda y: (y * 2,) * 2, lambda y: (y, y)),
}


class Gate(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cheap, self.branches = nn.Linear(8, 8, bias=False), BRANCHES[name]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.cheap(x)
        outputs = torch.cond(y.sum() > 0, *self.branches, (y,))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *[output.softmax(-1) for output in outputs], y + 1


def interpreted_is_eager(model: nn.Module, folder: Path) -> None:
    program = export(load_source(model, lambda: calls()[0]), {}).programs.first
    with torch.no_grad():
        expected = [model(x) for x in calls()]
    task = task_of(program, calls()[0], calls(), folder)
    (outcome,) = interpret([task], folder, budget=1)
    read = iter(outcome.read)
    for stage, wanted in zip(task.stages, expected, strict=True):
        check(stage, wanted, [next(read) for _ in wanted])


def loaded_is_eager(path: Path, model: nn.Module) -> None:
    program = cgbundle.load(path)
    for x in calls():
        with torch.no_grad():
            expected = model(x)
        for got, want in zip(program(x), expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(got), want)


def calls() -> list[Tensor]:
    """Returns one input for each branch."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    return [x, -x]


@newer
@pytest.mark.parametrize("name", BRANCHES)
def test_lowered_for_sm_90(name: str, tmp_path: Path) -> None:
    interpreted_is_eager(Gate(name).eval(), tmp_path)


@newer
@pytest.mark.parametrize("name", ["itself", "one twice"])
def test_built_for_the_cpu(name: str, tmp_path: Path) -> None:
    model = Gate(name).eval()
    sizes = {"batch": (2, 4)}
    built = cgcompile.build(model, lambda batch: torch.randn(batch, 8), sizes=sizes, target="cpu", out=tmp_path / "gate.cgb")
    loaded_is_eager(built.path, model)


class Handed(nn.Module):
    """The outputs are results of branches: the input, a weight, or a view. One output is the input in both branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x, (x,))
        z = torch.cond(x.sum() > 0, lambda x: self.weight + x.sum(), lambda x: self.weight, (x,))
        u, v = torch.cond(x.sum() > 0, lambda x: (x + 1, x + 2), lambda x: (x * 3,) * 2, (x,))
        return y, y[:, :4], z, u, v, x[:, 2:], u.reshape(-1), v.reshape(-1)


@newer
@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_branch_gives_is_no_part_of_an_input(sign: int, tmp_path: Path) -> None:
    """The branch that the example takes must not decide whether the output is the input: the other branch may differ."""
    model, out = Handed().eval(), tmp_path / "handed.cgb"
    built = cgcompile.build(model, lambda batch: torch.rand(batch, 8) * sign, sizes={"batch": (2, 4)}, target="cpu", out=out)
    program = cgbundle.load(built.path)
    for x in (torch.rand(4, 8), -torch.rand(4, 8)):
        with torch.no_grad():
            expected = model(x)
        for got, want in zip(program(x), expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(got), want)


class Given(nn.Module):
    """A loop that starts with one tensor three times and with a view of it; branches that take a tensor twice, and a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = x.cos()

        def turn(i: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
            return i + 1, a * 0.5, b + i, c - a, d * 3

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        outputs = torch.while_loop(lambda i, *rest: i < 3, turn, (start, first, first, first, first[:2]))
        if not NEWER:  # torch.cond of 2.11 refuses the following, also in eager PyTorch
            return *outputs, first + 1
        one = torch.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a * b.sum(), (first, first))
        two = torch.cond(x.sum() > 0, lambda a, b: a - b.sum(), lambda a, b: a * b.mean(), (first, first.t()))
        return *outputs, one, two, first + 1


def test_operands_that_share_memory_lowered_for_sm_90(tmp_path: Path) -> None:
    interpreted_is_eager(Given().eval(), tmp_path)


def test_operands_that_share_memory_built_for_the_cpu(tmp_path: Path) -> None:
    model, handler = Given().eval(), Told()
    SERIALIZER.addHandler(handler)
    try:
        built = cgcompile.build(model, lambda: calls()[0], target="cpu", out=tmp_path / "given.cgb")
    finally:
        SERIALIZER.removeHandler(handler)
    assert handler.lines == []  # no warning: torch would warn about operands that the loop does not have
    loaded_is_eager(built.path, model)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
