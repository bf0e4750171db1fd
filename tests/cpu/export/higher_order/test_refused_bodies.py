"""Bodies that torch refuses, also in eager PyTorch: the error names the body, the reason and the fix in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.model.load import load_source
from tests.helpers.raising import raises

TURNS = 3

LATER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""In torch 2.11 eager PyTorch also refuses a body that writes to an operand; 2.12 was not tested."""


class Loop(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64), x, x * 2
        return torch.while_loop(lambda i, y, z: i < TURNS, self.body, start)[1]  # the error names this line


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def talking(y: Tensor) -> Tensor:
            print(y.sum().item())
            return y + 1

        return torch.cond(x.sum() > 0, talking, lambda y: y * 2, (x,))


BODIES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], str, str]] = {
    "an operand": (lambda i, y, z: (i + 1, y * 2, z), "a body gives an operand itself, or one tensor twice", "x.clone()"),
    "one twice": (lambda i, y, z: (i + 1, *[y * 2] * 2), "a body gives an operand itself, or one tensor twice", "x.clone()"),
    "an operand written to": (
        lambda i, y, z: (i + 1, y.add_(1), z + 1),
        *(("a body gives an operand itself", "x.clone()") if LATER else ("a body writes to an operand", "x + 1")),
    ),
    "dtype": (lambda i, y, z: (i + 1, y.double(), z + 1), "a tensor of dtype float64 for one of float32", "dtype"),
    "shape": (lambda i, y, z: (i + 1, y[:1] + 1, z + 1), r"a tensor of shape \[1, 4\] for one of \[2, 4\]", "shape"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_loops_body(name: str) -> None:
    body, message, fix = BODIES[name]
    line = next(
        at for at, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# the error names this line")
    )
    with raises("eager-failed", match=rf"test_refused_bodies\.py:{line}: .*: torch\.while_loop: .*{message}") as raised:
        export(load_source(Loop(body), lambda: torch.ones(2, 4)), {})
    assert fix in raised.value.hint


def test_a_branch_that_calls_what_torch_cannot_trace() -> None:
    with raises("eager-failed", match=r"torch\.cond: torch refuses a body: .*`print`") as raised:
        export(load_source(Branch(), lambda: torch.ones(2, 4)), {})
    assert "tensors alone" in raised.value.hint


class Writing(nn.Module):
    """Bodies that write to an operand or to a view of it: PyTorch runs them, but torch.export does not make them functional."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        if self.loop:
            start = torch.zeros((), dtype=torch.int64), x
            return torch.while_loop(lambda i, y: i < TURNS, lambda i, y: (i + 1, y.add_(1) * 2), start)[1]  # the loop writes
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y[:1].mul_(3) * y, (x,))  # the branch writes


@pytest.mark.parametrize(("loop", "comment"), [(True, "the loop writes"), (False, "the branch writes")])
def test_a_body_that_writes_to_an_operand(loop: bool, comment: str) -> None:
    line = next(at for at, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# {comment}"))
    code, said = ("export-failed", r"a body of torch\.\w+ writes") if LATER else ("eager-failed", r".*torch\.\w+: a body writes")
    with raises(code, match=rf"test_refused_bodies\.py:{line}: {said} to an operand") as raised:
        functional(export(load_source(Writing(loop), lambda: torch.ones(2, 4)), {}).programs.first)
    assert "x + 1" in raised.value.hint
