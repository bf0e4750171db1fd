"""`one_hot` whose number of classes comes from a tensor; the model uses only the first columns of the result."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.cpu.model.devices.function_model import Model, ids, operations, traced
from tests.helpers.raising import raises

COLUMNS = 4


def routed(model: Model, index: torch.Tensor) -> torch.Tensor:
    return F.one_hot(index, max(index.max() + 2, COLUMNS))[..., :COLUMNS]


def test_the_first_columns_are_those_of_eager_pytorch() -> None:
    exported = traced(routed, ids)
    assert not exported.obstacles and "one_hot" in operations(exported)
    for index in (torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.full((8,), COLUMNS), ids(8)):
        (result,) = exported.programs.at((8,)).module(check_guards=False)(index)
        assert torch.equal(result, routed(Model(routed), index))


def test_an_index_that_is_no_class_fails_as_in_eager_pytorch() -> None:
    zeros = lambda batch: torch.zeros(batch, dtype=torch.int64)  # noqa: E731
    exported = traced(lambda model, index: F.one_hot(index, max(index[0], COLUMNS))[..., :COLUMNS], zeros)
    with pytest.raises(RuntimeError, match="Class values must be"):
        exported.programs.at((8,)).module(check_guards=False)(torch.tensor([5, *[7] * 7]))


@pytest.mark.parametrize(
    "taken",
    [lambda rows: rows.float().sum(-1), lambda rows: rows[..., 1:COLUMNS], lambda rows: rows * 2, lambda rows: torch.sum(rows, -1)],
)
def test_all_columns_are_a_size_that_depends_on_data(taken: object) -> None:
    with raises("data-dependent-shape", match="test_one_hot.py:"):
        traced(lambda model, index: taken(F.one_hot(index, max(index.max() + 2, COLUMNS))), ids)  # type: ignore[operator]
