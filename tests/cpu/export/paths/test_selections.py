"""Rows that a path selects are computed at a fixed size and give the results of eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from cgcompile.export.bounded import fixed_sizes
from cgcompile.export.bounded.axes import depends
from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported
from cgcompile.model.load import load_source
from cgcompile.model.source import CPU
from tests.helpers.models.path_models import rows
from tests.helpers.models.selecting_models import Added, Assigned, Experts, Mixed, Put, Remembers, Shifted, Spline, Summed

CALLS = 120


def exported(model: nn.Module) -> Exported:
    exported_model = export(load_source(copy.deepcopy(model), rows), {})
    refuse_branches(exported_model)
    return exported_model


def inputs(number: int) -> torch.Tensor:
    """Returns random rows: of any sign, all positive, all negative, far outside, or all equal."""
    torch.manual_seed(number)
    x = torch.randn(3, 4) * [0.1, 1.0, 3.0][number % 3]
    return [x, x.abs() + 0.01, -x.abs() - 0.01, x + 50, x[:1].repeat(3, 1)][number % 5]


@pytest.mark.parametrize("kind", [Spline, Experts, Assigned, Summed, Mixed, Shifted])
def test_selected_rows_are_those_of_eager_pytorch(kind: Callable[[], nn.Module]) -> None:
    model = kind().eval()
    program = exported(model).programs.first.module(check_guards=False)
    for number in range(CALLS):
        x = inputs(number)
        with torch.no_grad():
            wanted, outputs = model(x.clone()), program(x.clone())
        torch.testing.assert_close(list(outputs), list(wanted) if isinstance(wanted, tuple) else [wanted])


@pytest.mark.parametrize("kind", [Put, Added])
def test_a_position_that_eager_pytorch_refuses_is_refused(kind: Callable[[], nn.Module]) -> None:
    """Padding rows are written to an extra row, which is not a valid position for real rows."""
    model = kind().eval()
    source = replace(load_source(copy.deepcopy(model), rows), target_device=CPU)
    program, refused = export(source, {}).programs.first.module(check_guards=False), 0
    for number in range(CALLS):
        x = inputs(number)
        try:
            with torch.no_grad():
                wanted = model(x.clone())
        except (IndexError, RuntimeError):
            refused += 1
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                program(x.clone())
            continue
        torch.testing.assert_close(program(x.clone())[0], wanted)
    assert 10 < refused < CALLS - 10


def test_no_size_of_such_a_program_depends_on_data() -> None:
    program = exported(Spline().eval()).programs.first
    parts = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    assert not [node for part in parts for node in part.graph.nodes if depends(node)]


def test_our_look_at_an_object_is_no_read_of_the_model() -> None:
    rules = [obstacle.rule for obstacle in exported(Remembers().eval()).obstacles]
    assert "mutated-attribute" not in rules


def test_a_size_is_read_from_a_tensor_that_comes_before() -> None:
    """The trace may read the size of any input, also of one that the program computes later (a spline flow of nflows)."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() + x.neg()

    sizes = ({0: torch.export.Dim("batch", min=2, max=8)},)
    root = torch.export.export(Two(), (torch.rand(4, 3),), dynamic_shapes=sizes).graph_module
    x, relu, neg = list(root.graph.nodes)[:3]
    size = neg.meta["val"].shape[0]
    graph = torch.fx.Graph()
    _, late = graph.placeholder("early"), graph.placeholder("late")
    read = graph.call_function(torch.ops.aten.sym_size.int, (late, 0))
    ones = graph.call_function(torch.ops.aten.ones.default, ([read],))
    graph.output([ones])
    read.meta["val"], ones.meta["val"] = size, neg.meta["val"]
    copies = fixed_sizes._copied(root, torch.fx.GraphModule({}, graph), [x, neg], [relu], {read.name: relu, ones.name: relu})
    root.graph.lint()
    assert copies[0].args[0][0].args == (x, 0)
