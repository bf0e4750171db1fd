"""Decompositions for both recorders: matrix-vector products become sums if the sum reads memory in order; `argmax` is computed in
parts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cgcompile.targets.cuda.inductor import _decompositions  # noqa: E402
from cgcompile.transforms.few_rows.decompositions import LONG, PART, ROWS, SMALL, argmax, read_in_order  # noqa: E402

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("a", "b", "sums"),
    [
        (torch.randn(1, 600), torch.randn(700, 600).t(), True),  # a row times a weight of nn.Linear
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
    for operation, operands in (
        (aten.mm.default, (a, b)),
        (aten.addmm.default, (added, a, b)),
        (aten.bmm.default, (a[None], b[None])),
    ):
        actual = table[operation](*operands)
        assert (actual is not NotImplemented) == sums
        if sums:
            torch.testing.assert_close(actual, operation(*operands), rtol=1e-4, atol=1e-4)
    small = b.numel() * b.element_size() <= SMALL
    assert a.shape[-2] != 1 or read_in_order(a, b) == (small or b.stride(0) == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, LONG), (3, LONG + 1), (2, 1, 3 * LONG - 5)])
def test_the_largest_of_a_long_axis_is_found_by_parts(shape: tuple[int, ...], dtype: Any) -> None:
    torch.manual_seed(0)
    drawn = torch.randn(shape).to(dtype)  # as bfloat16 many elements are equal, and the first one counts
    nothing = torch.full(shape, float("-inf"), dtype=dtype)
    last = nothing.clone()
    last[..., -1] = 0
    unknown = drawn.clone()
    unknown[..., [PART + 7, 5 * PART + 1, -1]] = float("nan")
    for x in (drawn, nothing, last, unknown, torch.full(shape, float("inf"), dtype=dtype)):
        assert torch.equal(argmax(x, -1), x.argmax(-1))
        assert torch.equal(argmax(x, x.dim() - 1, True), x.argmax(-1, keepdim=True))
    assert torch.equal(argmax(drawn[0, 0] if drawn.dim() == 3 else drawn[0]), drawn.reshape(-1, shape[-1])[0].argmax())


@pytest.mark.parametrize(
    ("x", "dim"),
    [
        (torch.zeros(1, LONG - 1), -1),
        (torch.zeros(ROWS, LONG), -1),  # one block per multiprocessor
        (torch.zeros(LONG, 2), 0),
        (torch.zeros(2, LONG), None),
        (torch.zeros(1, LONG, dtype=torch.int64), -1),
        (torch.zeros(()), None),
        (torch.zeros(0, LONG), -1),
    ],
)
def test_other_axes_are_left_to_the_compiler(x: Any, dim: int | None) -> None:
    assert argmax(x, dim) is NotImplemented
