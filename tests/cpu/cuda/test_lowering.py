"""Lowering for a capture, with the CPU as device: AOTAutograd and Inductor receive the exported graph unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cgcompile.targets.cuda.lowering import lower, repair
from tests.helpers.raising import raises

ROWS = torch.export.Dim("rows", min=2, max=64)


class Everything(nn.Module):
    """Tied weights, state, a mutated input, outputs that are views of each other or of an input, and an output that is an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(10, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, index: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        scale.mul_(2)
        output = self.second(torch.relu(self.first(self.bag(index)))) * scale
        return output, output.t(), scale, index[:1], index, self.calls * 3


def program(module: nn.Module, *inputs: torch.Tensor, dynamic: Any = None) -> torch.fx.GraphModule:
    with torch.no_grad():
        exported = torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic, strict=False)
    return repair(exported.module(check_guards=False))


@pytest.fixture(autouse=True)
def no_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs Inductor's graph without compiling C++: AOTAutograd's result and the calls stay the same."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx as module

    def keep(graph: torch.fx.GraphModule, inputs: Any, **_: object) -> Callable[..., Any]:
        Inductor(graph).run(*inputs)
        return make_boxed_func(graph.forward)

    real = module.compile_fx

    def compile_fx(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        return real(graph, inputs, **{**options, "inner_compile": keep})

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    with torch._inductor.config.patch("fx_graph_cache", False):
        yield


class Inductor(torch.fx.Interpreter):
    """Interprets a graph like Inductor's lowering, without kernels for cosine and exponential (used by silu)."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target in (torch.ops.aten.cos.default, torch.ops.aten.exp.default):
            raise NotImplementedError("could not find kernel; auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0);")
        return super().run_node(n)


@pytest.fixture
def no_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if Dynamo is called."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Dynamo was asked")

    import torch._dynamo

    monkeypatch.setattr(torch._dynamo, "optimize", refuse)
    monkeypatch.setattr(torch, "compile", refuse)


def calls(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 10, (rows, 5)), torch.randn(8)


@pytest.mark.usefixtures("no_dynamo")
@pytest.mark.parametrize("specialize", ["size", "shared"])
def test_a_program_is_lowered_as_it_is(specialize: str) -> None:
    model = Everything()
    dynamic = ({0: ROWS}, None)
    for rows in (4, 6):
        module, plain = [program(Everything(), *calls(4), dynamic=dynamic) for _ in range(2)]
        call = lower(module, "inductor", specialize)
        place = module.calls.data_ptr()
        index, scale = calls(rows)
        for turn in (1, 2):  # the first call compiles
            mine, its = scale.clone(), scale.clone()
            with torch.no_grad():
                outputs, wanted = call(index, mine), plain(index, its)
            for got, want in zip(outputs, wanted, strict=True):
                torch.testing.assert_close(got, want)
                assert got.stride() == want.stride()
            assert torch.equal(mine, its) and torch.equal(mine, scale * 2)
            assert float(module.calls) == float(plain.calls) == turn and module.calls.data_ptr() == place
            assert outputs[0].data_ptr() == outputs[1].data_ptr() and outputs[2].data_ptr() == mine.data_ptr()
            assert outputs[3].data_ptr() == outputs[4].data_ptr() == index.data_ptr()
    del model


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x + 1) * 2


class FailingPart(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x + 1)


@pytest.mark.parametrize(("kind", "name"), [(Failing, "aten.cos"), (FailingPart, "aten.silu")])
def test_a_compilers_failure_names_the_operator_its_line_and_what_to_do(kind: type[nn.Module], name: str) -> None:
    call = lower(program(kind(), torch.randn(4)), "inductor", "size")
    line = kind.forward.__code__.co_firstlineno + 1
    with raises("lowering-failed", match=rf"operator {name} at \S*test_lowering.py:{line} cannot be lowered: ") as caught:
        call(torch.randn(4))
    assert (
        "Vectorized" not in str(caught.value)
        and f"--lower eager; or keep it on the host: cgcompile build ... --fallback-op {name}" in caught.value.hint
    )


def test_the_level_eager_lowers_nothing() -> None:
    module = program(Failing(), torch.randn(4))
    assert lower(module, "eager", "size") is module


class Recurrences(nn.Module):
    """Recurrent layers over many steps, and one over few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, bidirectional=True, batch_first=True, proj_size=3)
        self.gru, self.short = nn.GRU(6, 5), nn.LSTM(5, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, states = self.lstm(x)
        z, state = self.gru(y.transpose(0, 1))
        return self.short(z[:3])[0], *states, state


def test_layers_of_many_steps_are_not_written_out() -> None:
    model = Recurrences().eval()
    x = torch.randn(2, 40, 4)
    module = program(model, x)
    nodes = len(module.graph.nodes)
    with torch.no_grad():
        outputs = lower(module, "inductor", "size")(x)
        want = model(x)
    assert [str(node.target) for node in module.graph.nodes].count("cgcompile.recurrent.default") == 2
    assert len(module.graph.nodes) == nodes and torch.ops.aten.lstm.input in [node.target for node in module.graph.nodes]
    assert [output.shape for output in outputs] == [output.shape for output in want]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(outputs, want, strict=True))
