"""Splitting the inner axis of products changes no result: the graph runs on real tensors before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cgcompile.export.export import export
from cgcompile.model.load import load_source
from cgcompile.model.source import sample
from cgcompile.offline.decompose.retrace import Retraced, retrace
from cgcompile.offline.decompose.split_k import split_k
from cgcompile.offline.lower.fake_device import fake_device
from cgcompile.offline.tuning.cost_model import Problem
from cgcompile.offline.tuning.split_factors import split_factor
from cgcompile.targets.architectures import arch
from cgcompile.util.tolerance import compare

aten = torch.ops.aten

H200 = arch("sm_90")

ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Tolerance between two summation orders of 128 to 256 products: a few rounding steps of the dtype, relative to the largest."""


class Of(nn.Module):
    """A function of a (batch, 256) tensor and a weight (256, 24), with a bias of 24 elements and another one with an element per
    row."""

    def __init__(self, function: Callable[[Of, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(256, 24, dtype=dtype))
        self.across = nn.Parameter(torch.randn(24, 256, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(24, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mm(m: Of, x: Tensor) -> Tensor:
    return x @ m.weight


def linear(m: Of, x: Tensor) -> Tensor:
    return nn.functional.linear(x, m.across, m.bias)


def left_strided(m: Of, x: Tensor) -> Tensor:
    """The left factor consists of every second element of its rows, from the second on."""
    return x[:, 1::2] @ m.weight[:128]


def left_transposed(m: Of, x: Tensor) -> Tensor:
    """The left factor is stored by columns: the stride of its inner axis is not 1."""
    return m.weight.T[:, :128] @ x[:2].reshape(128, 4)


def right_strided(m: Of, x: Tensor) -> Tensor:
    return x[:, :128] @ m.weight[::2, 3:20]


def two_readers(m: Of, x: Tensor) -> Tensor:
    """Two operations read the product, one of them with another layout; the product is also a factor of another product."""
    y = x @ m.weight
    return torch.cat([torch.relu(y), y.T.contiguous().T * 2, y @ m.across[:, :64]], 1)


FUNCTIONS = (mm, linear, left_strided, left_transposed, right_strided, two_readers)


class OnCpu(torch.fx.Interpreter):
    """Runs a retraced graph on the CPU, which has no kernel for `aten.bmm.dtype`."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.bmm.dtype:
            assert {argument.dtype for argument in args[:2]} < {torch.float16, torch.bfloat16} and args[2] is torch.float32
            return torch.bmm(args[0].float(), args[1].float())
        return super().call_function(target, args, kwargs)


def traced(function: Callable[[Of, Tensor], Tensor], dtype: torch.dtype) -> tuple[Retraced, list[Tensor]]:
    """Returns the graph and real tensors for it; must be called inside `fake_device`."""
    source = load_source(Of(function, dtype).eval(), lambda batch: (torch.randn(batch, 256, dtype=dtype),))
    program, (example,) = export(source, {"batch": (4,)}).programs.first, sample(source, {"batch": 4}).tensors
    retraced = retrace(program, [example])
    state = {**program.state_dict, **program.constants}
    return retraced, [example if kind == "input" else state[name].detach() for kind, name in retraced.names]


def count(retraced: Retraced, *targets: Any) -> int:
    return sum(node.target in targets for node in retraced.graph.graph.nodes)


def run(retraced: Retraced, tensors: list[Tensor]) -> Tensor:
    (result,) = OnCpu(retraced.graph).run(*tensors, enable_io_processing=False)
    return result


@pytest.mark.parametrize("cut", [2, 4, 8])
@pytest.mark.parametrize("dtype", ERROR, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_cut_product_is_the_same_product(function: Callable[[Of, Tensor], Tensor], dtype: torch.dtype, cut: int) -> None:
    asked: list[Problem] = []

    def always(problem: Problem) -> int:
        asked.append(problem)
        return cut if problem.k > 64 else 1

    with fake_device(H200):
        retraced, tensors = traced(function, dtype)
        before, whole = run(retraced, tensors), count(retraced, aten.mm.default, aten.addmm.default)
        assert split_k(retraced, "sm_90", always) is retraced
    after = run(retraced, tensors)
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    assert compare(before, after).error <= ERROR[dtype]
    assert not torch.equal(after, torch.zeros_like(after))
    short = sum(problem.k <= 64 for problem in asked)
    assert count(retraced, aten.mm.default, aten.addmm.default) == short and len(asked) == whole
    assert count(retraced, aten.bmm.default, aten.bmm.dtype) == whole - short > 0
    assert {problem.dtype for problem in asked} == {str(dtype).removeprefix("torch.")}


def test_partial_sums_are_float32() -> None:
    """Adding half-precision parts in half precision would be less accurate than the product that is not split."""
    with fake_device(H200):
        retraced, _ = traced(linear, torch.bfloat16)
        split_k(retraced, "sm_90", lambda problem: 4)
    (total,) = [node for node in retraced.graph.graph.nodes if node.target is aten.sum.dim_IntList]
    (added,) = [node for node in retraced.graph.graph.nodes if node.target is aten.add.Tensor]
    assert total.meta["val"].dtype is added.meta["val"].dtype is torch.float32
    (output,) = [node for node in retraced.graph.graph.nodes if node.op == "output"]
    assert output.args[0][0].meta["val"].dtype is torch.bfloat16


def test_the_problem_is_what_the_product_computes() -> None:
    asked: list[Problem] = []
    with fake_device(H200):
        retraced, _ = traced(two_readers, torch.bfloat16)
        split_k(retraced, "sm_90", lambda problem: asked.append(problem) or 1)
    assert [(p.kind, p.batch, p.m, p.n, p.k, p.dtype, p.arch) for p in asked] == [
        ("mm", 1, 4, 24, 256, "bfloat16", "sm_90"),
        ("mm", 1, 4, 64, 24, "bfloat16", "sm_90"),
    ]
    assert count(retraced, aten.bmm.default, aten.bmm.dtype) == 0, "1 leaves a product whole"


def test_what_new_nodes_say_of_their_results_is_what_they_compute() -> None:
    """Lowering reads shapes, dtypes and strides from the nodes; an error would only show on a GPU."""
    with fake_device(H200):
        retraced, tensors = traced(left_strided, torch.float16)
        split_k(retraced, "sm_90", lambda problem: 2)
    seen: list[str] = []

    class Compare(OnCpu):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function":
                said = n.meta["val"]
                assert (result.dtype, result.shape) == (said.dtype, said.shape), n
                assert said.device.type == "cuda"
                seen.append(str(n.target))
            return result

    Compare(retraced.graph).run(*tensors, enable_io_processing=False)
    assert "aten.bmm.dtype" in seen


def test_the_users_line_stays_with_the_parts() -> None:
    with fake_device(H200):
        retraced, _ = traced(mm, torch.float32)
        split_k(retraced, "sm_90", lambda problem: 2)
    made_of = [node for node in retraced.graph.graph.nodes if node.target in (aten.bmm.default, aten.sum.dim_IntList)]
    assert len(made_of) == 2 and all("test_split_k.py" in node.meta["stack_trace"] for node in made_of)


def test_the_default_choice_cuts_a_narrow_product() -> None:
    """`split_factor` is the function that lowering passes to `split_k`."""
    narrow = Problem(kind="mm", batch=1, m=8, n=64, k=8192, dtype="bfloat16", arch="sm_90")
    assert split_factor(narrow, H200) > 1
    with fake_device(H200):
        retraced, _ = traced(mm, torch.bfloat16)
        split_k(retraced, "sm_90", lambda problem: split_factor(narrow, H200))
    assert count(retraced, aten.bmm.dtype) == 1
