"""The range of an index input is found in the exported program; it is conservative if the input has other uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import embedding, one_hot

from cgcompile.export.signature.index_ranges import index_ranges

TABLE, SHORT, GRID, CUBE = torch.ones(100, 4), torch.ones(7, 4), torch.ones(3, 50), torch.ones(2, 3, 50)
LONG = torch.zeros(2, 3, dtype=torch.int64)

CASES: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor, tuple[int, int] | None]] = {
    "an embedding": (lambda x: embedding(x, TABLE), LONG, (0, 100)),
    "of int32": (lambda x: embedding(x.long(), TABLE), LONG.int(), (0, 100)),
    "the smaller of two": (lambda x: embedding(x, TABLE) + embedding(x, SHORT), LONG, (0, 7)),
    "another shape": (lambda x: embedding(x.t().reshape(6).unsqueeze(0), TABLE), LONG, (0, 100)),
    "plus a constant, as positions of OPT and BART": (lambda x: embedding(x + 2, TABLE), LONG, (-2, 98)),
    "minus a constant": (lambda x: embedding(x - 1, TABLE), LONG + 1, (1, 101)),
    "an axis that counts from the end, too": (lambda x: GRID[:, x], LONG, (-50, 50)),
    "behind a mask of two dimensions": (lambda x: CUBE[CUBE[..., 0] > 0, x], LONG[0, :1], (-50, 50)),
    "index_select": (lambda x: TABLE.index_select(0, x.flatten()), LONG, (0, 100)),
    "gather": (lambda x: GRID.gather(1, x), LONG, (0, 50)),
    "one_hot": (lambda x: one_hot(x, 9), LONG, (0, 9)),
    "a part": (lambda x: embedding(x[:, :1], TABLE), LONG, None),
    "times two": (lambda x: embedding(x * 2, TABLE), LONG, None),
    "a cast that may lose bits": (lambda x: embedding(x.int(), TABLE), LONG, None),
    "where it is in range": (lambda x: embedding(torch.where(x < 100, x, 0), TABLE), LONG, None),
    "clamped": (lambda x: embedding(x.clamp(0, 99), TABLE), LONG, None),
    "a mask": (lambda x: torch.where(x == 0, 1.0, 2.0), LONG, None),
    "a number": (lambda x: x * 2, LONG, None),
    "an axis of another input's size": (lambda x: x.float().index_select(0, x[0] * 0), LONG, None),
}


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.function(x) + other


@pytest.mark.parametrize("name", CASES)
def test_range(name: str) -> None:
    function, indices, expected = CASES[name]
    program = torch.export.export(Model(function), (indices, torch.ones(())))
    assert index_ranges(program) == [expected, None]
