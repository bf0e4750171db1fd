"""A model that is one function, for tests of its devices and of its exported operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cgcompile.export.export import export
from cgcompile.export.exported import Exported
from cgcompile.model.load import load_source


class Model(nn.Module):
    """Calls a function with this module, which has a weight, a buffer and a plain tensor, and a (batch, 4) tensor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.rand(10, 4))
            self.plain = torch.rand(4)
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(self, *tensors)


def rows(batch: int) -> torch.Tensor:
    return torch.rand(batch, 4)


def ids(batch: int) -> torch.Tensor:
    return torch.randint(0, 10, (batch,))


def traced(function: Callable[..., Any], inputs: Callable[..., Any] = rows) -> Exported:
    return export(load_source(Model(function), inputs), {"batch": (1, 8)})


def operations(exported: Exported) -> list[str]:
    """Returns the short names of the program's operations, without assertions."""
    calls = [node.target for node in exported.programs.first.graph.nodes if node.op == "call_function"]
    names = [str(target).split(".")[1] for target in calls if isinstance(target, torch._ops.OpOverload)]
    return [name for name in names if not name.startswith("_assert")]


def obstacle(function: Callable[..., Any], file: str) -> str:
    """Returns the rule of the function's only obstacle, whose line must lie in `file`, a test's file."""
    (hit,) = traced(function).obstacles
    where, _, line = hit.where.rpartition(":")
    assert file.endswith(where)
    with open(file) as text:
        assert text.readlines()[int(line) - 1].strip() == hit.source
    return hit.rule
