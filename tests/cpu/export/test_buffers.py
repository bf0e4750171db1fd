"""Buffers that the program does not use, and buffers that the first call creates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import cgbundle
import cgcompile
from cgcompile.errors import ModelError
from cgcompile.export.export import export
from cgcompile.model.load import load_source
from cgcompile.model.tracing.held_tensors import own_buffers


def rows(batch: int) -> torch.Tensor:
    return torch.rand(batch, 4)


class Unread(nn.Module):
    """A sparse buffer that only other methods than forward() read, like the alignment heads of openai-whisper."""

    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x)
        return torch.sparse.mm(self.heads, output.t()).t() if self.read else output


class Filled(nn.Module):
    """The first call creates the buffer with its final shape, as in timm's ConViT."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        self.register_buffer("relative", torch.zeros(1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[1] if self.kept else x.shape[0]
        if self.relative.shape[1] != width:
            self.relative = torch.arange(float(width))[None]
        return x + self.relative.sum()


def test_a_sparse_buffer_that_no_call_reads_is_left_out() -> None:
    model = Unread(read=False)
    with own_buffers(model):
        names = export(load_source(model, rows), {"batch": (1, 4)}).programs.weights()
    assert sorted(names) == ["model.linear.bias", "model.linear.weight"]
    assert model._buffers["heads"].is_sparse and "heads" not in vars(model)


def test_one_that_is_read_is_refused_with_its_line() -> None:
    with pytest.raises(ModelError) as caught:
        cgcompile.build(Unread(read=True), rows, sizes=[2], target="cpu", out="never.cgb")
    assert "test_buffers.py:33" in str(caught.value)


def test_a_buffer_that_the_first_call_makes_keeps_its_shape(tmp_path: Path) -> None:
    model = Filled(kept=True)
    cgcompile.build(model, rows, sizes=[2], target="cpu", out=tmp_path / "f.cgb")
    assert model.relative.shape == (1, 1)
    with cgbundle.load(tmp_path / "f.cgb") as program:
        x = rows(2)
        torch.testing.assert_close(program(x), x + 6)


def test_a_buffer_made_anew_at_every_size_is_no_state() -> None:
    exported = export(load_source(Filled(kept=False), rows), {"batch": (2, 4)})
    for size in (2, 4, 2):
        x = rows(size)
        (result,) = exported.programs.at((size,)).module()(x)
        torch.testing.assert_close(result, x + sum(range(size)))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x * 2
        return self.rows + 1


class Derived(Base):
    """Inherits forward()."""


def test_a_buffer_of_another_shape_is_refused_at_the_line_of_the_class_that_assigns_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"test_buffers.py:\d+: forward\(\) assigns") as caught:
        cgcompile.build(Derived(), rows, sizes=[2, 4], target="cpu", out=tmp_path / "d.cgb")
    line = int(str(caught.value).split(":")[1])
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == "self.rows = x * 2"
    assert caught.value.__cause__ is not caught.value


class FirstCall(nn.Module):
    """A flag tells whether the first batch has initialized the means, as in some k-means models."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(4))
        self.register_buffer("there", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.there:
            self.means.data.copy_(x.mean(0))
            self.there.data.copy_(torch.tensor(True))
        return x - self.means


def test_what_is_written_through_data_is_state_of_the_next_call() -> None:
    exported = export(load_source(FirstCall(), rows), {"batch": (2,)})
    assert [obstacle.rule for obstacle in exported.obstacles] == ["path"]
    program, model = exported.programs.first.module(check_guards=False), FirstCall()
    for x in (rows(2), rows(2)):
        torch.testing.assert_close(program(x)[0], model(x))
