"""Products of one row that are cut into parts: a product for every part, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from cgcompile.targets.cuda.inductor import _decompositions  # noqa: E402
from cgcompile.transforms.few_rows.products import SUM  # noqa: E402
from cgcompile.transforms.few_rows.repeated_reductions import repeat_reductions  # noqa: E402
from cgcompile.transforms.few_rows.split_products import split_products  # noqa: E402

F = torch.nn.functional


def qkv(x: Any, dtype: Any = torch.float32) -> Any:
    made = F.linear(x.to(dtype), torch.randn(96, 120).to(dtype), torch.randn(96).to(dtype))
    return made * 2 + torch.arange(96)


def unbound(x: Any) -> Any:
    q, k, v = qkv(F.layer_norm(x, (120,))).view(1, 3, 4, 1, 8).unbind(1)
    return torch.cat([(q * k).flatten(), v.flatten()])


def halves(x: Any) -> Any:
    q, k, v = qkv(x, torch.bfloat16).view(1, 1, 96).split(32, dim=-1)
    return torch.cat([q.sigmoid() * k, v], -1)


def one_of_them(x: Any) -> Any:
    return qkv(x).chunk(2, -1)[1]


def across(x: Any) -> Any:
    """Every third column."""
    q, k, v = qkv(x).view(1, 32, 3).unbind(2)
    return q * k + v


def unlike(x: Any) -> Any:
    q, k = qkv(x).split([64, 32], -1)
    return q.sum() * k


def read_whole(x: Any) -> Any:
    made = qkv(x)
    q, k, v = made.split(32, -1)
    return q * k + v + made.sum()


def two_rows(x: Any) -> Any:
    q, k, v = qkv(torch.cat([x, x])).split(32, -1)
    return q * k + v


@pytest.mark.parametrize(
    ("call", "columns"),
    [(unbound, 32), (halves, 32), (one_of_them, 48), (across, 96), (unlike, 96), (read_whole, 96), (two_rows, None)],
)
def test_the_numbers_are_the_same(call: Callable[[Any], Any], columns: int | None) -> None:
    x = torch.randn(1, 120)
    torch.manual_seed(0)
    module = make_fx(call, decomposition_table=_decompositions(), tracing_mode="fake")(x)
    torch.manual_seed(0)
    expected = call(x)
    split_products(module.graph)
    sums = module.graph.find_nodes(op="call_function", target=SUM)
    assert {node.meta["val"].shape[-1] for node in sums if node.args[1] == [-2]} == ({columns} if columns else set())
    repeat_reductions(module.graph)
    module.graph.lint()
    module.recompile()
    torch.manual_seed(0)
    bound = 5e-2 if call is halves else 1e-4
    torch.testing.assert_close(module(x), expected, rtol=bound, atol=bound)
