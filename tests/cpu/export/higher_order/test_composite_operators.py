"""Operators that are decomposed into other operators of PyTorch."""

from __future__ import annotations

import pytest
import torch

from cgcompile.export.higher_order.expand import FEW, give_sizes_at_once, grouped_product, without_composites


@pytest.mark.parametrize("groups", [1, 3, FEW, FEW + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_of_rows(groups: int, dtype: torch.dtype) -> None:
    """Some groups have no row, some rows come after the last group, or all rows are in one group."""
    torch.manual_seed(0)
    rows, matrices = torch.randn(10, 16, dtype=dtype), torch.randn(groups, 16, 8, dtype=dtype)
    ends = torch.randint(0, 10, (groups,)).sort().values.to(torch.int32)
    for offs in (ends, torch.zeros_like(ends), torch.full_like(ends, 10)):
        expected, begin = torch.zeros(10, 8, dtype=dtype), 0
        for group, end in enumerate(offs.tolist()):
            expected[begin:end] = rows[begin:end] @ matrices[group]
            begin = end
        torch.testing.assert_close(grouped_product(rows, matrices, offs), expected)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = torch.nn.Parameter(torch.randn(4, 16, 24, dtype=torch.bfloat16))

    def forward(self, rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(rows, self.matrices, offs=offs)


def test_a_program_calls_no_grouped_product() -> None:
    example_inputs = (torch.randn(10, 16, dtype=torch.bfloat16), torch.tensor([2, 2, 7, 10], dtype=torch.int32))
    program = without_composites(torch.export.export(Experts(), example_inputs))
    assert not [node for node in program.graph.nodes if "grouped" in str(node.target)]


def test_a_tensor_that_is_resized_at_once_is_made_in_its_size() -> None:
    model, x = torch.nn.CrossMapLRN2d(3).eval(), torch.randn(2, 4, 5, 5)
    program = torch.export.export(model, (x,))
    give_sizes_at_once(program)
    plain = program.run_decompositions({})  # this raised an error before the fix
    torch.testing.assert_close(plain.module()(x), model(x))


def test_a_tensor_that_is_looked_at_before_it_is_resized_stays() -> None:
    class Looked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            empty = x.new_empty(0)
            return empty.sum(), torch.empty(0).resize_(2, 3).fill_(1) + empty.resize_(2, 3).zero_() + x

    program = torch.export.export(Looked(), (torch.randn(2, 3),))
    give_sizes_at_once(program)
    assert [str(node.target) for node in program.graph.nodes].count("aten.resize_.default") == 1
