"""Decompositions equal PyTorch's operators."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from cgcompile.errors import ModelError  # noqa: E402
from cgcompile.offline.decompose.decompositions import solve_triangular  # noqa: E402
from cgcompile.offline.decompose.reductions import scatter_reduced  # noqa: E402
from cgcompile.offline.decompose.sort import kthvalue  # noqa: E402

SCATTERS = [
    ((5, 3), (7, 3), (7, 3), 0),
    ((5, 4), (7, 2), (9, 3), 0),
    ((4, 5, 6), (2, 9, 3), (3, 9, 5), 1),
    ((6,), (4,), (4,), -1),
    ((), (1,), (1,), 0),
]
"""Shapes of the tensor, the indices and the source, and the axis."""


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16])
def test_scatters_are_those_of_pytorch(reduce: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for (shape, indices, source, dim), include_self in itertools.product(SCATTERS, (True, False)):
        x, src = (torch.randn(shape) * 5).to(dtype), (torch.randn(source) * 5).to(dtype)
        index = torch.randint(0, shape[dim] if shape else 1, indices)
        actual = scatter_reduced(x, dim, index, src, reduce, include_self=include_self)
        wanted = x.scatter_reduce(dim, index, src, reduce, include_self=include_self)
        torch.testing.assert_close(actual, wanted, **({"rtol": 2e-2, "atol": 1e-2} if dtype == torch.float16 else {}))


def test_nan_is_scattered_where_its_index_says() -> None:
    x, src = torch.zeros(3), torch.tensor([1.0, torch.nan, 2.0])
    actual = scatter_reduced(x, 0, torch.tensor([0, 1, 2]), src, "amax")
    assert actual.isnan().tolist() == [False, True, False]


def test_large_scatters_are_refused() -> None:
    x = torch.zeros(1 << 17, device="meta")
    index = torch.zeros(1 << 16, dtype=torch.int64, device="meta")
    with pytest.raises(ModelError, match="by amax of 65536 elements to 131072 places") as caught:
        scatter_reduced(x, 0, index, x[: 1 << 16], "amax")
    assert caught.value.code == "operator-without-kernel"


@pytest.mark.parametrize("size", [0, 1, 2, 7, 33])
def test_triangles_are_solved_as_pytorch_does(size: int) -> None:
    torch.manual_seed(0)
    for upper, left, unitriangular, (one, other) in itertools.product(
        (True, False), (True, False), (True, False), (((), ()), ((), (3,)), ((2, 1), (1, 3)))
    ):
        a = torch.randn(*one, size, size, dtype=torch.float64) / 4 + 3 * torch.eye(size, dtype=torch.float64)
        b = torch.randn(*other, *((size, 4) if left else (4, size)), dtype=torch.float64)
        actual = solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular)
        torch.testing.assert_close(actual, torch.linalg.solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular))


def test_large_triangles_are_refused() -> None:
    with pytest.raises(ModelError, match="129 unknowns"):
        solve_triangular(torch.eye(129), torch.ones(129, 1), upper=False)


@pytest.mark.parametrize("keepdim", [True, False])
def test_order_statistics_are_those_of_pytorch(keepdim: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 9)
    x[1, 3] = torch.nan
    for k, dim in ((1, -1), (9, -1), (4, 1), (2, 0)):
        for actual, wanted in zip(kthvalue(x, k, dim, keepdim), torch.kthvalue(x, k, dim, keepdim), strict=True):
            torch.testing.assert_close(actual, wanted, equal_nan=True)
    assert [output.item() for output in kthvalue(torch.tensor(2.0), 1)] == [2.0, 0]
