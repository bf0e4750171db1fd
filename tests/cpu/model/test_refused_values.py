"""Values in a model or its outputs that no bundle supports are refused in one line, with an alternative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.model.user_code import first_line
from tests.helpers.raising import raises


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any], weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        if weight is not None:
            self.s = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def report(model: nn.Module, target: str = "cpu") -> Any:
    return cgcompile.check(model.eval(), lambda batch: (torch.randn(batch, 8),), sizes=[1, 8], target=target)


def test_a_sparse_weight_is_named() -> None:
    sparse = Model(lambda m, x: torch.sparse.mm(m.s, x.t()).t(), torch.eye(8).to_sparse())
    with raises("dtype-unsupported", match="weight 's' is sparse") as caught:
        report(sparse)
    assert caught.value.hint == "make it dense: .to_dense()"


class Elsewhere(nn.Parameter):
    """A parameter whose elements belong to another tensor, as in a library for points on manifolds."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "stride":
            raise TypeError("use .tensor")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_parameter_that_keeps_its_elements_elsewhere_is_named() -> None:
    model = Model(lambda m, x: x + 1)
    model.s = Elsewhere(torch.ones(8))
    with raises("dtype-unsupported", match="weight 's' is a Elsewhere, which has no strides"):
        report(model)


class Tagged(torch.Tensor):
    pass


def test_a_class_of_tensors_that_the_model_makes_is_named_at_its_line() -> None:
    with raises("export-differs", match=r"test_refused_values.py:\d+: a traced tensor cannot become a Tagged"):
        report(Model(lambda m, x: x.as_subclass(Tagged) * 2))


@pytest.mark.parametrize(
    ("function", "kind", "cure"),
    [
        (lambda m, x: torch.nested.nested_tensor([x, x]), "nested", ".to_padded_tensor(0)"),
        (lambda m, x: x.to_sparse(), "sparse", ".to_dense()"),
    ],
)
def test_an_output_that_is_not_dense_is_named(function: Callable[..., Any], kind: str, cure: str) -> None:
    with raises("dtype-unsupported", match=f"expected a dense tensor, got a {kind} one") as caught:
        report(Model(function))
    assert caught.value.hint.endswith(cure)


def test_numpy_inside_of_forward_is_named_at_its_line() -> None:
    with raises("numpy-untraceable", match=r"test_refused_values.py:\d+: NumPy cannot be traced"):
        report(Model(lambda m, x: torch.from_numpy(numpy.sort(x.detach().numpy(), 0)) + x))


def ended_by_data(model: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.sum().abs().item()) % 5):
        x = x * 2
    return x


def ended_early(model: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x * 2
        if x.abs().max() < 1e-3:
            break
    return x


def test_a_loop_that_data_ends_is_told_of_while_loop() -> None:
    (refusal,) = [finding for finding in report(Model(ended_by_data), "cuda").findings if finding.severity == "refuse"]
    assert refusal.rule == "data-dependent-branch" and "torch.while_loop" in refusal.fix


def test_a_bounded_loop_that_data_ends_early_is_several_paths() -> None:
    check_report = report(Model(ended_early), "cuda")
    assert not check_report.refused and [finding.rule for finding in check_report.findings].count("path") == 3


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("/__w/pytorch/build/aten/src/ATen/Register_0.cpp:9486: SymIntArrayRef expected", "SymIntArrayRef expected"),
        ('x INTERNAL ASSERT FAILED at "/pytorch/c10/core/a.cpp":12, please report', "x INTERNAL ASSERT FAILED please report"),
        ("../aten/src/x.h:3\n\nwrong size", "wrong size"),
        ("model.py:3: wrong size", "model.py:3: wrong size"),
    ],
)
def test_no_message_names_a_file_that_a_library_was_built_from(raised: str, said: str) -> None:
    assert first_line(RuntimeError(raised)).replace("  ", " ") == said
