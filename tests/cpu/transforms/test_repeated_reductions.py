"""Norms and softmaxes before products of one row are computed again for every column if that is faster. The results stay the
same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from cgcompile.targets.cuda.inductor import _decompositions  # noqa: E402
from cgcompile.transforms.few_rows.products import LONGEST, one_product  # noqa: E402
from cgcompile.transforms.few_rows.repeated_reductions import MOST, REDUCTIONS, SOFTMAX, repeat_reductions  # noqa: E402

F = torch.nn.functional
aten = torch.ops.aten


def weights(*shape: int) -> Any:
    return torch.randn(shape)


def norm(x: Any, length: int) -> Any:
    return F.layer_norm(x, (length,), weights(length), weights(length))


def rms(x: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def attention(x: Any) -> Any:
    scores = torch.where(torch.arange(40) > 30, float("-inf"), x.view(1, 3, 1, 40) / 2)
    return (torch.softmax(scores, -1) @ weights(1, 3, 40, 24)).view(1, -1)


def online(x: Any) -> Any:
    """A softmax in the form in which Inductor rewrites it."""
    most, total = SOFTMAX(x.view(3, 1, 40), -1)
    return (torch.exp(x.view(3, 1, 40) - most) / total) @ weights(3, 40, 24)


def shared(x: Any) -> Any:
    y = rms(x)
    return torch.cat([F.linear(y, weights(width, 120), weights(width)) for width in (40, 40, 24)], -1)


def used_elsewhere(x: Any) -> Any:
    y = norm(x, 120)
    return F.linear(y, weights(40, 120)).sum() + y


def of_two_rows(x: Any) -> Any:
    return F.linear(norm(x.view(2, 60), 60), weights(40, 60))


def of_itself(x: Any) -> Any:
    """Attention of a single token: both factors come from the row."""
    y = rms(x.view(3, 1, 40))
    return (y * 2) @ (y + 1).view(3, 40, 1)


def many_columns(x: Any) -> Any:
    return F.linear(norm(x, 120), weights(MOST + 1, 120))


def long(x: Any) -> Any:
    return F.linear(norm(x.repeat(1, 10), LONGEST + 176), weights(40, LONGEST + 176))


def of_a_column(x: Any) -> Any:
    return F.linear(norm(x.view(120, 1).cumsum(0).view(1, 120), 120), weights(40, 120))


def behind_another(x: Any) -> Any:
    """A residual is computed once: the input of the second norm is not recomputed with the first."""
    x = x + F.linear(norm(x, 120), weights(120, 120))
    return x + F.linear(norm(x, 120), weights(120, 120))


@pytest.mark.parametrize(
    ("call", "repeated"),
    [
        (lambda x: F.linear(norm(x, 120), weights(40, 120)), 1),
        (lambda x: F.linear(norm(x, 120).to(torch.bfloat16), weights(40, 120).to(torch.bfloat16)), 1),
        (attention, 2),
        (online, 2),
        (shared, 2),  # two of the three products have equally many columns, and share one repeated norm
        (behind_another, 2),
        (of_a_column, 1),
        (lambda x: F.linear(x, weights(40, 120)), 0),
        (of_itself, 0),
        (used_elsewhere, 0),
        (of_two_rows, 0),
        (many_columns, 0),
        (long, 0),
    ],
)
def test_the_numbers_are_the_same(call: Callable[[Any], Any], repeated: int) -> None:
    x = torch.randn(1, 120)
    torch.manual_seed(0)
    module = make_fx(call, decomposition_table=_decompositions(), tracing_mode="fake")(x)
    torch.manual_seed(0)
    expected = call(x)
    repeat_reductions(module.graph)
    module.graph.lint()
    module.recompile()
    torch.manual_seed(0)
    bound = 1e-2 if expected.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(module(x), expected, rtol=bound, atol=bound)
    reductions = [
        node for node in module.graph.nodes
        if node.target in REDUCTIONS and node.args[0].target is not aten.mul.Tensor and 24 <= _rows(node) <= 120
    ]  # fmt: skip
    assert len(reductions) == repeated, module.graph


def _rows(node: Any) -> int:
    shape = node.args[0].meta["val"].shape
    return shape[-2] if len(shape) > 1 else 0


@pytest.mark.parametrize("axes", [None, [], [0, 1]])
def test_a_sum_over_all_axes_is_no_product_of_a_row(axes: list[int] | None) -> None:
    """The decompositions turn `x.norm()` into such a sum."""
    graph = make_fx(lambda x: torch.ops.aten.sum.dim_IntList(x * x, axes))(torch.rand(1, 6)).graph
    (total,) = [node for node in graph.nodes if "sum" in node.name]
    assert one_product(total) is None
