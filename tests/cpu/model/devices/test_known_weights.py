"""Values that Python reads from parameters and buffers are known at build time if no call writes to them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from cgcompile.export.export import export, refuse_branches, with_unwritten
from cgcompile.export.exported import Exported
from cgcompile.model.load import load_source, load_sources

Function = Callable[["Asking", torch.Tensor], Any]


class Asking(nn.Module):
    """A function of a module with weights of several kinds."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([0.5, -0.2, 0.9, 0.1]))
        self.linear = parametrizations.weight_norm(nn.Linear(4, 4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mode", torch.tensor([1.0]))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("repeats", torch.tensor([1, 2, 0, 3]))
        self.register_buffer("index", torch.tensor(2))
        self.register_buffer("times", torch.linspace(0, 1, 6))
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 4),)


def exported(function: Function) -> Exported:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = export(load_source(Asking(function).eval(), rows), {"batch": (2, 5)})
    refuse_branches(traced)
    return traced


def check(traced: Exported, function: Function) -> None:
    """Checks that ten consecutive calls of every program equal those of a new module."""
    for key, program in traced.programs.by_key.items():
        module = copy.deepcopy(program).module()
        torch.manual_seed(0)
        model = Asking(function).eval()
        model.load_state_dict(traced.flat.model.state_dict())
        for _ in range(10):
            (x,) = rows(*key)
            with torch.no_grad():
                expected = model(x.clone())
                got = module(x.clone())
            for one, other in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
                torch.testing.assert_close(one, other)


def solver(m: Asking, x: torch.Tensor) -> torch.Tensor:
    for time in m.times:
        x = x + time
        if time > 0.5:
            break
    return x


def ranges(m: Asking, x: torch.Tensor) -> torch.Tensor:
    count = int(m.repeats[3])
    return x[:, :count] + torch.arange(count) + sum(x[:, at].sum() for at in range(m.index))


def written_copy(m: Asking, x: torch.Tensor) -> torch.Tensor:
    """A write to a copy of a weight does not change the weight."""
    weight = m.weight.detach() * 1
    weight[0] = 5.0
    weight.mul_(2)
    return x * 2 if weight.sum() > 9 else x + 100


def given_out(m: Asking, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(4)
    torch.add(m.weight, m.weight, out=total)
    return x * 2 if total.sum() > 1 else x


def assigned_by_position(m: Asking, x: torch.Tensor) -> torch.Tensor:
    output = torch.zeros_like(x)
    output[:, m.index] = x[:, 0]
    output[0, m.mask] = 7.0
    return output


def caught(m: Asking, x: torch.Tensor) -> torch.Tensor:
    try:
        if m.weight.sum() > 0:
            raise ValueError("of the model")
    except ValueError:
        return x * 5
    return x


KNOWN: list[Function] = [
    solver, ranges, written_copy, given_out, assigned_by_position, caught,
    lambda m, x: m.linear(x) * (2 if m.linear.weight.norm() > 0.1 else 1),
    lambda m, x: x[:, m.mask] + x[:, m.index, None],
    lambda m, x: (torch.repeat_interleave(x, m.repeats, dim=1), x.repeat_interleave(m.repeats, 1)),
    lambda m, x: x[:, m.weight.nonzero()[:, 0]] * torch.where(m.weight > 0)[0].numel() * m.repeats.unique(),
    lambda m, x: x * m.weight.tolist()[0] + m.index.item(),
    lambda m, x: x * 2 if 3 in m.repeats else x,
    lambda m, x: x * len(f"{m.index}"),
    lambda m, x: x * 2 if max(m.weight[0], m.weight[1]) > 0.3 else x,
    lambda m, x: x * 2 if torch.equal(m.weight, m.weight.clone()) and not torch.equal(m.weight, m.times) else x,
    lambda m, x: torch.split(x, [*m.repeats[1:2].tolist(), 2], dim=1)[0],
]  # fmt: skip


@pytest.mark.parametrize("function", KNOWN)
def test_what_no_input_reaches_is_known(function: Function) -> None:
    traced = exported(function)
    assert traced.programs.dynamic and traced.baked and {obstacle.rule for obstacle in traced.obstacles} == {"baked-weight"}
    assert all("test_known_weights.py:" in where for where in traced.baked.values())
    check(traced, function)


def test_the_weights_that_python_read_are_named() -> None:
    assert set(exported(solver).baked) == {"times"}
    assert set(exported(ranges).baked) == {"repeats", "index"}
    assert not exported(lambda m, x: m.linear(x) * m.weight).baked


def test_the_model_keeps_its_weights() -> None:
    traced = exported(written_copy)
    torch.manual_seed(0)
    for name, value in Asking(written_copy).state_dict().items():
        assert torch.equal(value, traced.flat.model.state_dict()[name])


def counted(m: Asking, x: torch.Tensor) -> torch.Tensor:
    output = x * 2 if m.count > 1 else x
    m.count += 1
    return output


def on_one_path(m: Asking, x: torch.Tensor) -> torch.Tensor:
    """The value that is read first is written on a data-dependent path."""
    output = x * 3 if m.mode.item() > 0 else x
    if x.sum() > 0:
        m.mode.fill_(-1.0)
    return output


def through_a_view(m: Asking, x: torch.Tensor) -> torch.Tensor:
    output = x * 3 if m.sums.sum() > 2 else x
    m.sums[1:2] += 1
    return output


def replaced(m: Asking, x: torch.Tensor) -> torch.Tensor:
    output = x * 3 if m.mode > 0 else x
    m.mode = m.mode - 0.6
    return output


def through_detach(m: Asking, x: torch.Tensor) -> torch.Tensor:
    output = x * 3 if m.sums.sum() > 2 else x
    m.sums.detach()[0] += 1
    return output


def normalized(m: Asking, x: torch.Tensor) -> torch.Tensor:
    """A normalization writes to its statistics without changing their version."""
    output = x * 3 if m.sums.sum() > 0 else x
    return F.batch_norm(output, m.sums, torch.ones(4), training=True)


def from_an_input(m: Asking, x: torch.Tensor) -> torch.Tensor:
    m.sums.copy_(x[0])
    return x * 3 if m.sums.sum() > 0 else x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (counted, "count"),
        (on_one_path, "mode"),
        (through_a_view, "sums"),
        (replaced, "mode"),
        (from_an_input, "sums"),
        (through_detach, "sums"),
        (normalized, "sums"),
    ],
)
def test_what_a_call_writes_to_is_not_known(function: Function, name: str) -> None:
    traced = exported(function)
    assert "path" in [obstacle.rule for obstacle in traced.obstacles] and not traced.baked and name in traced.written
    check(traced, function)


def statistics(m: Asking, x: torch.Tensor) -> torch.Tensor:
    mean = m.sums.clone()
    F.batch_norm(x, mean, torch.ones(4), training=True)
    return x * 2 if mean.sum() > 0 else x


def test_statistics_that_a_normalization_writes_are_not_known() -> None:
    traced = exported(statistics)
    assert "path" in [obstacle.rule for obstacle in traced.obstacles]
    check(traced, statistics)


def autocast(m: Asking, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = F.linear(m.weight[None], m.weight[None])
    return x * 2 if product.float().sum() > 1.11 else x  # 1.11 in 32 bits, 1.1094 in 16


def test_a_value_that_autocast_rounds_is_not_computed_without_it() -> None:
    traced = exported(autocast)
    assert "path" in [obstacle.rule for obstacle in traced.obstacles]
    check(traced, autocast)


def test_a_value_that_follows_from_a_varying_size_too_is_a_matter_of_each() -> None:
    def sized(m: Asking, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if (m.weight.sum() * torch.ones(x.shape[0])).sum() > 3 else x

    traced = exported(sized)
    assert not traced.programs.dynamic and set(traced.baked) == {"weight"}
    check(traced, sized)


def test_constant_sizes_in_a_tensor_of_sizes_are_known() -> None:
    def cropped(m: Asking, x: torch.Tensor) -> torch.Tensor:
        crop = torch.tensor(x.shape)[1:] - torch.tensor([2])
        (rows, _) = torch.tensor(x.shape).unbind()
        return F.pad(x, (-crop).tolist() * 2).sum() + x.reshape(rows.item(), -1)

    traced = exported(cropped)
    assert traced.programs.dynamic and not traced.obstacles and not traced.baked
    check(traced, cropped)


class Turns(nn.Module):
    """One entry reads a buffer that another one sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(0.0))
        self.register_buffer("other", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.flag > 0 and self.other > 0 else x

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        self.flag.add_(1)
        return x + self.flag


def test_what_another_entry_writes_to_is_not_known() -> None:
    sources = load_sources(Turns(), {"forward": rows, "turn": rows})
    alone = [export(source, {"batch": (2, 5)}, alone=False) for source in sources]
    assert set(alone[0].baked) == {"flag"} and alone[1].written == {"flag"}
    forward, turn = with_unwritten(alone)
    assert set(forward.baked) == {"other"} and [obstacle.rule for obstacle in forward.obstacles] == ["path", "baked-weight"]
    assert turn is alone[1]


def test_a_size_that_another_entry_changes_is_not_known() -> None:
    class Sized(Turns):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : int(self.flag) + 1].clone()

    alone = [export(source, {"batch": (2, 5)}, alone=False) for source in load_sources(Sized(), {"forward": rows, "turn": rows})]
    traced = with_unwritten(alone)[0]
    assert set(alone[0].baked) == {"flag"} and not traced.baked
    shape = traced.programs.first.graph.output_node().args[0][0].meta["val"].shape
    assert shape[1].node.expr.free_symbols, "its size depends on the buffer"
