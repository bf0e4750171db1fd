"""Captures programs with branches and loops; graphs are Python calls on the CPU. Every part without branches is captured once, and
replays on other data equal eager PyTorch."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cgcompile.targets.cuda.tensors import TensorPlace
from tests.cpu.capture.recorder import regions
from tests.helpers.models.conditional_models import MODELS, Guarded, Keeping

assert regions, "modules of the recorder can be imported from here on"
from cgcompile.capture.worker import control_flow, steps  # noqa: E402

JUNK = 77


class Graph:
    """A graph that repeats a call and writes to the outputs of its capture."""

    def __init__(self, call: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
        self.call, self.outputs = call, outputs

    def replay(self) -> None:
        with torch.no_grad():
            for target, value in zip(self.outputs, self.call(), strict=True):
                target.copy_(value)


class Captured:
    """A module captured with some inputs, which can be replayed with others."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.static = [argument.clone() if isinstance(argument, Tensor) else argument for argument in inputs]
        self.parts: list[str] = []
        self.graphs: list[Graph] = []
        lasting = [*tree_leaves(self.static), *module.buffers()]
        self.lasting = {leaf.untyped_storage().data_ptr() for leaf in lasting if isinstance(leaf, Tensor)}
        self.steps, self.results = control_flow.capture_blocks(
            module, self.static, lambda part: part, self.warm, self.keep, lambda tensor: False, "int_key (1,)"
        )

    def warm(self, call: Callable[[], Any], where: str, restore: Callable[[], None]) -> None:
        with torch.no_grad():
            call(), restore()

    def keep(self, call: Callable[[], Any], where: str) -> tuple[Any, Sequence[Tensor]]:
        self.parts.append(where)
        self.graphs.append(Graph(call, call()))
        return self.graphs[-1], self.graphs[-1].outputs

    def __call__(self, *inputs: Any) -> list[Any]:
        for graph in self.graphs:  # a replay must not depend on values of an earlier one
            for output in graph.outputs:
                if output.untyped_storage().data_ptr() not in self.lasting:
                    output.fill_(JUNK)
        for static, value in zip(self.static, inputs, strict=True):
            if isinstance(static, Tensor):
                static.copy_(value)
        steps.replay(self.steps)
        return [result.clone() if isinstance(result, Tensor) else result for result in self.results]


@pytest.fixture(autouse=True)
def bytes_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(place: TensorPlace) -> int:
        return ctypes.c_uint8.from_address(place.address).value

    monkeypatch.setattr(steps, "condition", read)


def module_of(model: nn.Module, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    with torch.no_grad():
        exported = torch.export.export(model, tuple(inputs), strict=False)
    return exported.module(check_guards=False)


@cache
def exported(name: str) -> torch.fx.GraphModule:
    """Returns the exported module of one of MODELS, which all examples share. Copy it: a capture may change it."""
    make, inputs, _ = MODELS[name]
    torch.manual_seed(1)
    return module_of(make().eval(), inputs()[:1])


def check(got: Sequence[Any], wanted: Any) -> None:
    for one, two in zip(got, tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("example", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_every_path_equals_eager_pytorch_whatever_path_the_example_took(name: str, example: int) -> None:
    make, inputs, kinds = MODELS[name]
    module = copy.deepcopy(exported(name))
    torch.manual_seed(1)
    model, examples = make().eval(), inputs()
    captured = Captured(module, [examples[example % len(examples)]])
    assert sorted(types(captured.steps)) == list(kinds)
    with torch.no_grad():
        wanted = [model(x) for x in examples]
    assert len({tuple(map(float, [leaf.double().sum() for leaf in tree_leaves(output)])) for output in wanted}) == len(examples)
    for x, want in [*zip(examples, wanted, strict=True), *zip(reversed(examples), reversed(wanted), strict=True)]:
        check(captured(x), want)


def types(captured_steps: steps.Steps) -> list[str]:
    inner = [step for step in captured_steps if isinstance(step, steps.Conditional)]
    return [step.type for step in inner] + [kind for step in inner for body in step.bodies for kind in types(body)]


def test_the_results_hold_what_the_example_gives() -> None:
    for name, (make, inputs, _) in MODELS.items():
        module = exported(name)
        torch.manual_seed(1)
        model, examples = make().eval(), inputs()
        for x in examples:
            with torch.no_grad():
                check(Captured(copy.deepcopy(module), [x]).results, model(x))


def test_a_lookup_that_the_example_must_not_take_is_captured() -> None:
    model, x = Guarded().eval(), torch.randn(2, 8)
    inputs = [torch.tensor(indices) for indices in ([9, 12], [0, 3], [1, 0], [3, 900])]
    captured = Captured(module_of(model, [inputs[0], x]), [inputs[0], x])
    assert torch.equal(captured.static[0], inputs[0])
    for ids in inputs:
        with torch.no_grad():
            check(captured(ids, x), model(ids, x))


def test_state_and_inputs_are_written_as_eager_does() -> None:
    model, other = Keeping(), Keeping()
    counts = torch.zeros(2, dtype=torch.int64)
    module = module_of(model, [torch.randn(3, 6), counts])
    first = {name: value.clone() for name, value in module.named_buffers()}
    captured = Captured(module, [torch.randn(3, 6), counts])
    for name, value in module.named_buffers():
        value.copy_(first[name])
    generator = torch.Generator().manual_seed(0)
    mine, theirs = counts.clone(), counts.clone()
    for _ in range(5):
        x = torch.randn(3, 6, generator=generator)
        with torch.no_grad():
            check(captured(x, mine), other(x, theirs))
        mine = captured.static[1].clone()
        assert torch.equal(mine, theirs)
        for name, value in other.named_buffers():
            torch.testing.assert_close(dict(module.named_buffers())[name], value)


class Numbers(nn.Module):
    """Symbolic sizes that are passed to bodies."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.shape[0]
        y = torch.cond(x.sum() > 0, lambda x: x.reshape(-1)[: n * 2] * n, lambda x: x.reshape(-1)[n : n * 3] + n, (x,))
        i, total = torch.while_loop(
            lambda i, t: i < n, lambda i, t: (i + 1, t + y.sum() * n), (torch.zeros((), dtype=torch.int64), y.sum())
        )
        return y.view(n, 2), total * n + i


def test_sizes_are_numbers_of_the_example() -> None:
    model = Numbers()
    dynamic = {"x": {0: torch.export.Dim("n", min=2, max=64)}}
    module = torch.export.export(model, (torch.randn(5, 4),), dynamic_shapes=dynamic, strict=False).module(check_guards=False)
    for rows in (3, 8):
        captured = Captured(module, [torch.randn(rows, 4)])
        for shift in (-1, 1):
            x = torch.randn(rows, 4) + shift
            check(captured(x), model(x))


def test_a_body_that_hands_on_what_it_is_given_has_results_of_its_own() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a, b, c = torch.cond(
                x.sum() > 0,
                lambda x: (x.clone(), x[:1].expand(3, 4).clone(), x.t().clone()),
                lambda x: (x * 2, x[1:] * 1 if x.shape[0] == 4 else x * 3, x.t() + 1),
                (x,),
            )
            x.mul_(0)
            return a + 1, b, c, a

    model, x = Same(), torch.randn(3, 4)
    captured = Captured(module_of(model, [x]), [x])
    for shift in (-2, 2):
        x = torch.randn(3, 4) + shift
        check(captured(x.clone()), model(x.clone()))
