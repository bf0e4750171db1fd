"""The signature of a program's functional form: the program's own if nothing writes, otherwise that of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from cgcompile.export.functionalization import functional, state_buffers, written_inputs


class Model(nn.Module):
    def __init__(self, code: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.code = code
        self.norm = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2, 3, 4))
        self.register_buffer("embedding", torch.ones(5, 4))
        self.register_buffer("head", self.embedding.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self, x)


def program(code: Callable[[Model, torch.Tensor], torch.Tensor], train: bool) -> ExportedProgram:
    rows = {0: Dim("rows", min=2, max=9)}
    return export(Model(code).train(train), (torch.randn(3, 4),), dynamic_shapes=(rows,), strict=False)


def counted(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls.add_(1)
    return x + model.calls


READING = {
    "linear": lambda model, x: model.linear(x).relu(),
    "views": lambda model, x: x.view(-1).clone()[1:],
    "attention": lambda model, x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "sizes": lambda model, x: x.reshape(x.shape[0] * 2, 2) * x.shape[0],
    "normalized": lambda model, x: model.norm(x),
    "dropout": lambda model, x: nn.functional.dropout(x),
    "rows by number": lambda model, x: x[torch.arange(2), torch.arange(2)],
}


def stored(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.cache[0, :2] = x[:2]
    return model.cache.sum() + x


def rows_stored(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.cache[torch.arange(2), torch.arange(2)] = x[:2]
    model.cache[torch.arange(2), :, torch.arange(2)] = x[:2, :3]
    x.mul_(2)
    return torch.cond(model.cache.sum() > 0, torch.sin, torch.cos, (x,))


@torch.library.custom_op("functional_signature::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("functional_signature::marked", mutates_args=("x",))
def marked(x: torch.Tensor) -> None:
    x.add_(1)


def marks(model: Model, x: torch.Tensor) -> torch.Tensor:
    marked(x)
    return x * 2


DIRECT = {
    "input": lambda model, x: x.add_(1),
    "buffer": counted,
    "rows of a buffer, an input, and a branch": rows_stored,
    "a clone of its own": lambda model, x: x.clone().relu_(),
    "its own, twice": lambda model, x: torch.zeros_like(x).masked_fill_(x > 0, 1).add_(x).mul_(2),
    "what a layer gives": lambda model, x: nn.functional.relu(model.linear(x), inplace=True) + model.norm(x).add_(1),
    "its own and a buffer": lambda model, x: counted(model, model.linear(x).add_(model.calls)),
    "an input with its own": lambda model, x: x.add_(x.clone().mul_(2)),
    "a graph inside": lambda model, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "an operator of others": lambda model, x: doubled(x),
    "a buffer, beside two in one memory": lambda model, x: counted(model, x @ model.head.T @ model.embedding),
}

MAYBE_WRITING = {
    "what a composite gives": (lambda model, x: torch.atleast_1d(x).add_(1), False),
    "a view of its own": (lambda model, x: x.clone()[0].relu_(), False),
    "through a view": (stored, False),
    "another's write": (marks, False),
    "trained": (lambda model, x: model.norm(x), True),
    "trained instances": (lambda model, x: model.instance(x[..., None].expand(-1, -1, 3)), True),
    "read out": (lambda model, x: x * x.sum().item(), False),
    "shape from data": (lambda model, x: x.nonzero(), False),
    "rows by a mask": (lambda model, x: x[x > 0], False),
}


@pytest.mark.parametrize("name", READING)
def test_what_only_reads_is_not_traced_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exported_program = program(READING[name], train=False)
    traced = exported_program.run_decompositions({}).graph_signature
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda *arguments: pytest.fail("traced again"))
    signature = functional(exported_program)
    assert (state_buffers(signature), written_inputs(signature)) == (state_buffers(traced), written_inputs(traced)) == ((), ())
    assert signature.user_inputs == traced.user_inputs


@pytest.mark.parametrize("name", DIRECT)
def test_writes_to_buffers_and_inputs_themselves_need_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exported_program = program(DIRECT[name], train=False)
    traced = exported_program.run_decompositions({}).graph_signature
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda *arguments: pytest.fail("traced again"))
    signature = functional(exported_program)
    assert (state_buffers(signature), written_inputs(signature)) == (state_buffers(traced), written_inputs(traced))
    assert signature.user_inputs == traced.user_inputs


@pytest.mark.parametrize("name", MAYBE_WRITING)
def test_what_may_write_is_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, train = MAYBE_WRITING[name]
    plain, traced = ExportedProgram.run_decompositions, []

    def trace(exported_program: ExportedProgram, *arguments: object) -> ExportedProgram:
        traced.append(exported_program)
        return plain(exported_program, *arguments)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", trace)
    signature = functional(program(code, train))
    assert len(traced) == 1
    assert bool(written_inputs(signature)) == (name in ("another's write", "what a composite gives"))
    assert bool(state_buffers(signature)) == (name in ("through a view", "trained"))
