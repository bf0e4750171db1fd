"""Products with a vector in captured programs: a sum where it reads in order, a library's otherwise."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cgcompile.targets.cuda.inductor import _decompositions  # noqa: E402
from cgcompile.transforms.vector_products import SMALL, read_in_order  # noqa: E402

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("a", "b", "sums"),
    [
        (torch.randn(1, 600), torch.randn(700, 600).t(), True),  # a row by a weight of nn.Linear
        (torch.randn(1, 600), torch.randn(600, 700), False),
        (torch.randn(1, 600), torch.randn(600, 7), True),  # small
        (torch.randn(700, 600), torch.randn(600, 1), True),
        (torch.randn(600, 700).t(), torch.randn(600, 1), False),
        (torch.randn(2, 600), torch.randn(700, 600).t(), False),
        (torch.ones(1, 600, dtype=torch.int64), torch.ones(600, 7, dtype=torch.int64), False),
    ],
)
def test_a_sum_reads_in_order(a: Any, b: Any, sums: bool) -> None:
    table, added = _decompositions(), torch.ones(b.shape[-1], dtype=a.dtype)
    for operation, given in (
        (aten.mm.default, (a, b)),
        (aten.addmm.default, (added, a, b)),
        (aten.bmm.default, (a[None], b[None])),
    ):
        made = table[operation](*given)
        assert (made is not NotImplemented) == sums
        if sums:
            torch.testing.assert_close(made, operation(*given), rtol=1e-4, atol=1e-4)
    small = b.numel() * b.element_size() <= SMALL
    assert a.shape[-2] != 1 or read_in_order(a, b) == (small or b.stride(0) == 1)
