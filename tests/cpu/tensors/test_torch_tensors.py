"""Inputs are compared with those of an earlier call by one call of torch. It never accepts inputs for which the calls would
differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cgbundle.tensors.torch_tensors import Torch


@pytest.fixture(params=["one question", "by descriptors"])
def library(request: pytest.FixtureRequest) -> Torch:
    torch_library = Torch(torch)
    assert torch_library._guards is not None
    if request.param == "by descriptors":
        torch_library._guards = None  # as if this torch had no such function
    return torch_library


def values() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


DIFFERENT: dict[str, Callable[[], Any]] = {
    "dtype": lambda: values().to(torch.float64),
    "shape": lambda: torch.zeros(4, 3),
    "rank": lambda: torch.zeros(12),
    "strides": lambda: torch.zeros(4, 3).t(),
    "device": lambda: values().to("meta"),
    "layout": lambda: values().to_sparse(),
    "negative": lambda: torch._neg_view(values()),
    "kind": lambda: values().numpy(),
    "no tensor": lambda: None,
}


@pytest.mark.parametrize("other", DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_told_apart(library: Torch, other: Callable[[], Any]) -> None:
    first = values()
    for count in (1, 2):
        tensors = [first] * count
        like = library.guard(tensors)
        assert like(tensors) is not None
        last = like([*tensors[1:], other()])
        assert last is None or last[0] != [first.data_ptr()] * count  # resolved tensors have other addresses
        assert like([*tensors, first]) is None and like([]) is None


def test_addresses_are_those_of_the_call(library: Torch) -> None:
    first, second = values(), values()
    answer = library.guard([first, second])([second, second])
    assert answer is not None and answer[0] == [second.data_ptr()] * 2
    answer = library.guard([first])((second,))
    assert answer is not None and answer[0] == [second.data_ptr()]


def test_numbers_that_memory_does_not_hold_are_resolved() -> None:
    library = Torch(torch)
    for value in (torch._neg_view(values()), torch.ones(3, dtype=torch.complex64).conj()):
        answer = library.guard([value])([value])
        assert answer is not None and answer[0] != [value.data_ptr()]
        ((kept, descriptor),) = answer[1]
        assert [kept.data_ptr()] == answer[0] == [descriptor[0]] and torch.equal(kept, value)


def test_every_mode_of_torch_has_a_likeness_of_its_own() -> None:
    """A guard that was made in another mode rejects the inputs, which only costs time."""
    library = Torch(torch)
    outside = library.guard([values()])
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        with mode():
            tensors = [values()]
            inside = library.guard(tensors)
            assert inside(tensors) is not None
            assert outside(tensors) in (None, ([tensors[0].data_ptr()], None))
