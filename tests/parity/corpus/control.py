"""Control flow that stays in the graph, and loops that unroll."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop

from ..case import case, rows, sequences

_case = partial(case, kind="control flow")


class Cond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.relu(), lambda y: -y, (x,))


class CondOnSize(nn.Module):
    """The branch depends on a size, so export decides it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.shape[1] > 4, lambda y: y.relu(), lambda y: -y, (x,))


class WhileLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, y: y.abs().max() > 0.1, lambda i, y: (i + 1, y * 0.5), (steps, x))[1]


class MapRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return map_rows(lambda row: row.softmax(-1), x)


class Scan(nn.Module):
    """A linear recurrence, step by step."""

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            state = 0.9 * state + token
            return state, state.clone()

        return scan(step, torch.zeros_like(x[:, 0]), x, dim=1)[1]


class ScanOfTheBatch(nn.Module):
    """A scan along a dimension with a declared size: the number of steps is not fixed."""

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = 0.9 * state + row
            return state, state.clone()

        return scan(step, torch.zeros_like(x[0]), x, dim=0)[1]


class AssociativeScan(nn.Module):
    """The recurrence of `Scan` as a parallel scan: one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return associative_scan(torch.add, x, dim=1, combine_mode="pointwise")


class UnrolledLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x + 1).tanh()
        return x


class LoopOverTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            state = 0.9 * state + token
        return state


class Vmap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * row.sum())(x)


CASES = (
    _case(Cond, rows, "control-flow"),
    _case(CondOnSize, rows, near=("control-flow",)),
    _case(WhileLoop, rows, "control-flow"),
    _case(MapRows, rows, "control-flow"),
    _case(Scan, sequences, near=("control-flow",)),
    _case(ScanOfTheBatch, rows, "control-flow"),
    _case(AssociativeScan, sequences, near=("control-flow",)),
    _case(UnrolledLoop, rows, near=("control-flow",)),
    _case(LoopOverTime, sequences, near=("control-flow",)),
    _case(Vmap, rows, near=("control-flow",)),
)
