"""Byte masks are treated as bool, and masks with known values select known sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cpu.model.devices.function_model import operations, rows, traced

BYTES = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)


def others(x: torch.Tensor) -> torch.Tensor:
    """Returns all elements of every matrix except the diagonal, as se3-transformer-pytorch excludes a node's relation to itself."""
    return x.masked_select(~torch.eye(3, dtype=torch.bool)[None])


def columns(x: torch.Tensor) -> torch.Tensor:
    return x.masked_select((torch.eye(2) > 0)[None, :, :, None]).reshape(x.shape[0], 2, 3)


KNOWN: list[tuple[str, Callable[..., Any]]] = [
    ("a condition of bytes", lambda m, x: torch.where((x > 0.5).byte(), x, -x)),
    ("a condition of bytes, as a method", lambda m, x: x.where((x > 0.5).to(torch.uint8), x * 2)),
    ("a condition by name", lambda m, x: torch.where(condition=(x > 0.5).byte(), input=x, other=-x)),
    ("literal bytes", lambda m, x: x[:, BYTES]),
    ("a literal mask", lambda m, x: x[:, torch.tensor([True, False, True, True])]),
    ("a mask of numbers", lambda m, x: (m.linear(x)[:, None] * x[:, :, None])[:, torch.ones(4, 4).triu().bool()]),
    ("a mask beside positions", lambda m, x: x[:, :, None].expand(-1, 4, 4)[:, torch.arange(4) > 2, torch.tensor([0])]),
    ("a mask with an ellipsis", lambda m, x: x[..., torch.arange(4) != 1]),
    ("masked_select", lambda m, x: m.plain.view(2, 2).masked_select(torch.eye(2) > 0) * x[:, :2]),
    ("masked_select for all rows", lambda m, x: others(x[:, :3, None].expand(-1, 3, 3)).reshape(x.shape[0], 3, 2)),
    ("masked_select for all columns", lambda m, x: columns(x[:, :2, None, None] * x[:, None, 2:, None] * x[:, None, None, :3])),
]


@pytest.mark.parametrize("function", [case[1] for case in KNOWN], ids=[case[0] for case in KNOWN])
def test_sizes_are_known(function: Callable[..., Any]) -> None:
    exported = traced(function)
    x = rows(3)
    torch.testing.assert_close(exported.programs.first.module(check_guards=False)(x)[0], function(exported.source.model, x))
    assert exported.programs.dynamic and not {"nonzero", "to_host"} & {*operations(exported)}
    assert not any("aten.sym_constrain" in str(node.target) for node in exported.programs.first.graph.nodes)


def test_a_mask_that_an_input_reaches_stays_one() -> None:
    exported = traced(lambda m, x: x[:, x.sum(0) > 0].sum())
    assert "index" in operations(exported)
