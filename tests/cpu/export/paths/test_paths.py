"""A program contains every path through a model's Python code, and equals eager PyTorch on each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported
from cgcompile.export.paths import merge
from cgcompile.export.paths.shown import _targets
from cgcompile.model.load import load_source
from tests.helpers.models.path_models import (
    Again,
    Best,
    Breaks,
    Chosen,
    Converted,
    Drawn,
    EarlyReturns,
    Foo,
    Listed,
    Nested,
    Numbers,
    Parts,
    Scaled,
    State,
    Twelve,
    Written,
    calls,
    rows,
)
from tests.helpers.raising import raises

CALLS = 200


class Function(nn.Module):
    """A model that calls one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def exported(model: nn.Module, max_paths: int = 64) -> Exported:
    exported_model = export(load_source(copy.deepcopy(model), rows), {}, max_paths=max_paths)
    refuse_branches(exported_model)
    return exported_model


@cache
def exported_once(kind: Callable[[], nn.Module]) -> Exported:
    return exported(kind().eval())


def outputs(model: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor] | str:
    """Returns the tensors of one call and its input; "raised" if it raises an error."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            output = model(x)
        except (AssertionError, RuntimeError):
            return "raised"
    return [*(output if isinstance(output, Sequence) else [output]), x]


@pytest.mark.parametrize(
    "kind",
    [
        Foo,
        EarlyReturns,
        Breaks,
        Numbers,
        State,
        Written,
        Parts,
        Best,
        Again,
        Drawn,
        Chosen,
        Nested,
        Twelve,
        Converted,
        Listed,
        Scaled,
    ],
)
def test_a_program_takes_the_path_of_eager_pytorch(kind: Callable[[], nn.Module]) -> None:
    model, exported_model = kind().eval(), exported_once(kind)
    assert any(obstacle.rule == "path" for obstacle in exported_model.obstacles) or kind is Scaled
    program = exported_model.programs.first.module(check_guards=False)
    for x in calls(CALLS):
        wanted, actual = outputs(model, x.clone()), outputs(program, x.clone())
        assert (wanted == "raised") == (actual == "raised")
        if wanted != "raised":
            torch.testing.assert_close(actual, wanted, equal_nan=True)


def test_the_tree_of_paths_is_printed_as_by_pytorch() -> None:
    (note,) = [obstacle for obstacle in exported_once(Foo).obstacles if obstacle.rule == "path"]
    assert note.message.startswith("Graph[0] -> Graph[1] if (y.sum() > 0), Graph[2] if not, then Graph[3]; example inputs took ")
    assert note.source.startswith("if y.sum() > 0:") and "path_models.py:" in note.where


@pytest.mark.parametrize(
    ("bodies", "joined", "text"),
    [
        ({True: "Graph[1]", False: ""}, "Graph[2]", "Graph[1] if (c), then Graph[2]"),
        ({True: "", False: "Graph[1]"}, "Graph[2]", "Graph[1] if not (c), then Graph[2]"),
        ({True: "Graph[1]", False: ""}, "", "Graph[1] if (c), else the end"),
        ({True: "Graph[1]", False: "Graph[2]"}, "", "Graph[1] if (c), Graph[2] if not"),
    ],
)
def test_a_side_without_operations_has_no_graph(bodies: dict[bool, str], joined: str, text: str) -> None:
    assert ", ".join(_targets(bodies, joined, "c")) == text


def test_progress_counts_the_exported_paths() -> None:
    messages: list[str] = []
    export(load_source(Foo().eval(), lambda: (rows(),)), {}, tell=messages.append)
    *paths, joined, verified = messages
    assert paths == [f"torch.export, path {number} through the model's branches" for number in range(1, len(paths) + 1)] and paths
    assert joined == "torch.export of 2 paths as one program" and verified == "every path in eager PyTorch"


def test_what_the_model_raises_is_what_a_call_raises() -> None:
    program = exported_once(Numbers).programs.first.module(check_guards=False)
    with pytest.raises(RuntimeError, match=r"path_models.py:\d+: .*failed: the model raises AssertionError: too large"):
        program(torch.full((3, 4), 9.0))


def test_a_branch_draws_no_numbers_of_the_other() -> None:
    program = exported_once(Drawn).programs.first.module(check_guards=False)
    results = [outputs(program, sign * torch.ones(3, 4)) for sign in (1, -1, 1)]
    assert torch.equal(results[0][0], results[2][0]) and not torch.equal(results[0][0], results[1][0])  # type: ignore[arg-type]


def endless(model: Function, x: torch.Tensor) -> torch.Tensor:
    while x.norm() > 1:
        x = x / 2
    return x


def endless_unless(model: Function, x: torch.Tensor) -> torch.Tensor:
    while not x.norm() <= 1:
        x = x / 2
    return x


def counted(model: Function, x: torch.Tensor) -> Any:
    model.calls += 1 if x.sum() > 1e9 else 0
    return x * 2 if model.calls < 3 else x


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (endless, "data-dependent-branch", "this loop has no known bound: it tested its condition 8 times: while x.norm"),
        (
            endless_unless,
            "data-dependent-branch",
            "this loop has no known bound: it tested its condition 8 times: while not x.norm",
        ),
        (lambda m, x: (x, 1) if x.sum() > 0 else (x, 2), "structure-unsupported", "different nesting or constants"),
        (
            lambda m, x: x if x.sum() > 0 else x.double(),
            "structure-unsupported",
            "one path returns float32 [3, 4], another path float",
        ),
        (
            lambda m, x: x[: int(x.sum())] if x.sum() > 2 else x,
            "data-dependent-branch",
            "a number that is read out of a tensor, as a size (",
        ),
    ],
    ids=["a loop without a bound", "a loop that the first answer leaves", "two constants", "two dtypes", "a size"],
)
def test_what_is_no_program_is_refused_with_its_line(function: Callable[..., Any], error: str, said: str) -> None:
    with raises(error) as caught:
        exported(Function(function), max_paths=8)
    assert said in str(caught.value) and "test_paths.py:" in str(caught.value)


def larger(model: Function, x: torch.Tensor) -> torch.Tensor:
    largest = max(x.max(), 1.5)  # torch.export makes an operation of this, so no value is read
    return x * largest if x.sum() > 0 else x - min(x.min(), 0.25)


def test_min_and_max_of_a_tensor_are_no_questions_beside_one() -> None:
    model = Function(larger)
    program = exported(model).programs.first.module(check_guards=False)
    for x in calls(20):
        torch.testing.assert_close(outputs(program, x.clone()), outputs(model, x.clone()))


def test_too_many_paths_are_refused_with_their_lines() -> None:
    with raises("data-dependent-branch", match="there are more than 4 paths"):
        exported(Parts(), max_paths=4)


def test_an_attribute_that_only_another_way_changes_is_refused() -> None:
    exported_model = exported(Function(counted))
    assert "mutated-attribute" in [obstacle.rule for obstacle in exported_model.obstacles]


def test_a_program_that_differs_on_one_path_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that no example reaches adds 1 instead of 2."""
    original = merge.in_place

    def wrong(*programs: Any) -> Any:
        program = original(*programs)
        for module in program.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                if node.target is torch.ops.aten.add.Tensor and node.args[1] == 2:
                    node.args = (node.args[0], 1)
                    module.recompile()
        return program

    monkeypatch.setattr(merge, "in_place", wrong)
    with raises("export-differs", match="the path of the answers True"):
        exported(Function(lambda m, x: x + 2 if x.sum() > 1e9 else x))


def test_a_path_on_which_examples_make_the_model_raise_is_told() -> None:
    def solved(model: Function, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            return torch.linalg.cholesky(torch.diag(x[0]) - 100 * torch.eye(4))[:3] + 0 * x
        return x * 2

    notes = [obstacle.message for obstacle in exported(Function(solved)).obstacles if obstacle.rule == "path"]
    assert "1 of the paths could not be compared with eager PyTorch: the model raises on example inputs there" in notes
    assert len(notes) == 2


def test_a_model_without_branches_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exports: list[Any] = []
    original = torch.export.export

    def counting(*args: Any, **kwargs: Any) -> Any:
        exports.append(args[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counting)
    monkeypatch.setattr("cgcompile.export.export.with_paths", None)
    assert not exported(nn.Linear(4, 4)).obstacles
    assert len(exports) == 1


def test_independent_questions_are_joined() -> None:
    for kind, count in ((Nested, 3), (Twelve, 12)):
        assert [obstacle.rule for obstacle in exported_once(kind).obstacles].count("path") == count


def test_sizes_are_no_questions() -> None:
    def sized(model: Function, x: torch.Tensor) -> torch.Tensor:
        wide = x * 2 if x.shape[0] > 2 and x.shape == model.calls_like.shape else x
        return wide + 1 if wide.max().item() > x.shape[0] else wide

    model = Function(sized)
    model.register_buffer("calls_like", torch.zeros(3, 4), persistent=False)
    exported = export(load_source(model, lambda batch: torch.randn(batch, 4)), {"batch": (3, 5)})
    refuse_branches(exported)
    assert {obstacle.source for obstacle in exported.obstacles if obstacle.rule == "path"} == {
        "return wide + 1 if wide.max().item() > x.shape[0] else wide"
    }
    for _, program in exported.programs.distinct:
        assert program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)


def check_on_random_inputs(exported: Exported, model: nn.Module) -> None:
    """Checks that every program gives the model's result at its sizes."""
    for (batch, *_), program in exported.programs.by_key.items():
        for _ in range(20):
            x = torch.randn(batch, 4)
            torch.testing.assert_close(program.module()(x)[0], model(x))


def test_constants_that_hold_the_same_are_one() -> None:
    def twice(m: Function, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
        y = x * first if x.sum() > 0 else x + second
        return y * second + first

    model = Function(twice).eval()
    exported = export(load_source(copy.deepcopy(model), lambda batch: (torch.randn(batch, 4),)), {"batch": (2, 5)})
    refuse_branches(exported)
    check_on_random_inputs(exported, model)


def test_tensors_of_two_shapes_are_not_equal_and_no_question() -> None:
    """Compares points of the model with points of a call, which may have another count, as gpytorch does."""

    def compared(m: Function, x: torch.Tensor) -> torch.Tensor:
        points = torch.arange(12.0).view(3, 4) * x.mean()
        if torch.equal(points, x):
            return x * 3
        return x * 2 if x.sum() > 0 else x

    model = Function(compared).eval()
    traced = export(load_source(copy.deepcopy(model), lambda batch: (torch.randn(batch, 4),)), {"batch": (2, 3, 5)})
    refuse_branches(traced)
    assert not traced.programs.dynamic
    asked = [
        sum(node.target is torch.ops.higher_order.cond for node in program.graph.nodes) for _, program in traced.programs.distinct
    ]
    assert asked == [1, 1, 1]  # with three points the second branch is inside the first
    check_on_random_inputs(traced, model)
