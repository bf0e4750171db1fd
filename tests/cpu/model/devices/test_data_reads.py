"""If Python reads tensor data during a trace, it gets the data of the example inputs, and the build reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported
from cgcompile.model.load import load_source
from cgcompile.model.side_effects import FLAG_FIX, branch_fix
from tests.cpu.model.devices.function_model import Model, obstacle, operations, rows, traced
from tests.helpers.raising import raises

BRANCHES: list[tuple[str, Callable[..., Any], str]] = [
    ("an if", lambda m, x: x + 1 if x.sum() > 0 else x - 1, "path"),
    ("an if on a number", lambda m, x: x + 1 if x.sum().item() > 0 else x - 1, "path"),
    ("equal", lambda m, x: x + 1 if torch.equal(x, x) else x - 1, "path"),
    ("a rounded number", lambda m, x: x + 1 if round(x.sum().item(), 2) > 0.5 else x, "data-dependent-branch"),
]


@pytest.mark.parametrize(("function", "rule"), [case[1:] for case in BRANCHES], ids=[case[0] for case in BRANCHES])
def test_obstacles_have_a_place(function: Callable[..., Any], rule: str) -> None:
    assert obstacle(function, __file__) == rule


def branches(model: Model, x: torch.Tensor) -> torch.Tensor:
    if x.sum() < 0:
        x = x.sin()
    while x.sum() < 100:
        x = x * 2 + 1
    if x.max().item() > 0:
        x = x.cos()
    return x * x.min().item()


def test_a_trace_branches_as_the_inputs_did_and_sees_what_comes_after() -> None:
    exported = traced(branches)
    names = operations(exported)
    assert "sin" not in names and "cos" in names and "mul" in names
    assert names.count("item") == 1, "the number that decides a branch is gone, the other is there"
    (loop,) = exported.obstacles
    assert loop.source == "while x.sum() < 100:" and "no known bound" in loop.message


def test_a_loop_that_the_inputs_did_not_enter_ends() -> None:
    def function(model: Model, x: torch.Tensor) -> torch.Tensor:
        while not torch.allclose(x, x):
            x = x + 1
        return x * 2

    exported = traced(function)
    assert operations(exported)[-1] == "mul" and [obstacle.rule for obstacle in exported.obstacles] == ["data-dependent-branch"]


@pytest.mark.parametrize("function", [branches, BRANCHES[3][1]])
def test_nothing_is_built_from_one_branch_of_several(function: Callable[..., Any]) -> None:
    with raises("data-dependent-branch", match=r"test_data_reads.py:\d+: data-dependent-branch: ") as caught:
        refuse_branches(export(load_source(Model(function), rows), {"batch": (1, 8)}))
    assert "\n" not in str(caught.value) and "torch.where" in caught.value.hint


def test_a_loop_over_what_was_chosen_is_told_to_take_all() -> None:
    def experts(model: Model, x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for column in (x.sum(0) > 0).nonzero():
            output[:, column] = x[:, column] * int(column)
        return output

    with raises("data-dependent-branch") as caught:
        refuse_branches(export(load_source(Model(experts), rows), {"batch": (1, 8)}))
    assert "for column in" in str(caught.value) and "every expert" in caught.value.hint


def test_a_flag_that_calls_change_is_told_of_the_first_call() -> None:
    flags = ("if self.initted:", "if not self.initted:", "elif self.steps.item():")
    others = ("if x.any():", "if self.steps > x.sum():", "if self.mask(x).any():")
    assert {branch_fix(line) for line in flags} == {FLAG_FIX} and FLAG_FIX not in {branch_fix(line) for line in others}


@pytest.mark.parametrize(
    "condition", [lambda m, x: x.shape[0] > 3, lambda m, x: m.training, lambda m, x: bool(torch.tensor(1) > 0)]
)
def test_what_no_input_decides_is_no_branch_on_data(condition: Callable[..., bool]) -> None:
    exported = export(load_source(Model(lambda m, x: x + 1 if condition(m, x) else x - 1), rows), {"batch": (4, 8)})
    assert exported.obstacles == ()


def refusing(model: Model, x: torch.Tensor) -> torch.Tensor:
    if x.isnan().any():
        raise ValueError("not a number")
    return x * 2


def asserting(model: Model, x: torch.Tensor) -> torch.Tensor:
    assert not torch.isinf(x).any()
    return x * 2


def longest(model: Model, x: torch.Tensor) -> torch.Tensor:
    longest = int((x * 0 + 1).sum(1).long().max().item())
    return x * (torch.arange(longest, device=x.device) < 3)


def functional(model: Model, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gaussian_nll_loss(x, x * 2, x)


def chosen(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.isnan().any() else x * 3


def counted(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * len(range(int((x * 0 + 1).sum(1).long().max().item())))


def targets(exported: Exported) -> list[Any]:
    return [node.target for node in exported.programs.first.graph.nodes]


@pytest.mark.parametrize(("function", "bad"), [(refusing, torch.nan), (asserting, torch.inf), (longest, None), (functional, -1.0)])
def test_the_one_way_to_go_on_is_asserted_on_the_host(function: Callable[..., Any], bad: float | None) -> None:
    exported = traced(function)
    assert {obstacle.rule for obstacle in exported.obstacles} == {"asserted-value"}
    assert operations(exported).count("to_host") == targets(exported).count(torch.ops.aten._assert_async.msg) == 1
    program = exported.programs.first.module(check_guards=False)
    x = rows(4)
    program(x)
    if bad is not None:
        with pytest.raises(
            RuntimeError, match=r"test_data_reads.py:\d+: an assertion of the model failed: the bundle needs the value (True|False)"
        ):
            program(torch.full_like(x, bad))


@pytest.mark.parametrize(("function", "rule"), [(chosen, "path"), (counted, "data-dependent-branch")])
def test_where_there_is_another_way_nothing_is_asserted(function: Callable[..., Any], rule: str) -> None:
    exported = traced(function)
    assert {obstacle.rule for obstacle in exported.obstacles} == {rule}
    assert torch.ops.aten._assert_async.msg not in targets(exported)
