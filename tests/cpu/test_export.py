"""Which axes are dynamic, which sizes a model allows, and the errors that name the dimension or the user's line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cgcompile import errors
from cgcompile.checks import check, refuse
from cgcompile.export import Exported, export
from cgcompile.source import load_source, sample
from cgcompile.targets import choose
from tests.cpu.models import Batched, rows


def exported(function: Callable[..., Any] | nn.Module, inputs: Callable[..., Any] = rows, **sizes: tuple[int, ...]) -> Exported:
    model = function if isinstance(function, nn.Module) else Batched(function)
    return export(load_source(model, inputs), sizes or {"batch": (1, 8)})


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + y.sum(1)


def test_dimensions_are_shared_across_inputs() -> None:
    made = exported(Two(), lambda batch, seq: (torch.rand(batch, seq), torch.rand(batch, 2 * seq + 1)), batch=(1, 4), seq=(3, 8))
    assert [spec.shape for spec in made.inputs] == [("batch", "seq"), ("batch", ("+", ("*", "seq", 2), 1))]
    assert made.outputs[0].shape == ("batch",)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.reshape(-1), (("*", "batch", 4),)),
        (lambda x: torch.cat([x, x]), (("*", "batch", 2), 4)),
        (lambda x: x @ x.T, ("batch", "batch")),
        (lambda x: x.sum(), ()),
        (lambda x: torch.outer(x[:, 0], x[:, 1]).reshape(-1), (("*", "batch", "batch"),)),
    ],
)
def test_output_shapes_follow_from_the_dimensions(function: Callable[..., Any], shape: tuple[Any, ...]) -> None:
    from cgbundle.sizes import evaluate

    (spec,) = exported(function).outputs
    for batch in (1, 2, 5, 8):
        expected = tuple(function(torch.rand(batch, 4)).shape)
        assert tuple(evaluate(size, {"batch": batch}) for size in spec.shape) == expected
        assert tuple(evaluate(size, {"batch": batch}) for size in shape) == expected


def test_only_the_range_of_the_sizes_has_to_work() -> None:
    assert exported(lambda x: x[3:], batch=(5, 8)).outputs[0].shape == (("-", "batch", 3), 4)
    assert exported(lambda x: x[::2], batch=(4, 8)).outputs[0].shape == (("//", ("+", "batch", 1), 2), 4)


def test_a_multiple_that_export_finds_is_taken_up() -> None:
    made = exported(lambda x: x.view(-1, 2, 4).sum(1), batch=(4, 8))
    assert made.inputs[0].shape == ("batch", 4)
    with pytest.raises(errors.SizeExcluded, match="batch=5 is excluded: the model needs a multiple of 2|batch=5"):
        exported(lambda x: x.view(-1, 2, 4).sum(1), batch=(4, 5, 8))


@pytest.mark.parametrize(
    ("function", "sizes", "error", "said"),
    [
        (lambda x: x.view(-1, 2, 4), (1, 8), errors.SizeExcluded, "batch=1"),
        (
            lambda x: x + torch.rand(8, 4)[: int(x.shape[0])] if x.shape[0] == 8 else x,
            (8,),
            errors.SizeExcluded,
            "'batch' cannot vary",
        ),
        (lambda x: x + torch.ones(8, 1), (8,), errors.SizeExcluded, "'batch' cannot vary"),
        (lambda x: x.sum() if x.sum() > 0 else x.mean(), (1, 8), errors.ExportFailed, "test_export.py:"),
        (lambda x: x[x > 0.5], (1, 8), errors.StructureUnsupported, "depends on data"),
        (lambda x: {1.5: x}, (1, 8), errors.StructureUnsupported, "neither text nor a number"),
        (lambda x: (x, x.shape[0]), (1, 8), errors.StructureUnsupported, "change with the sizes"),
        (lambda x: 3, (1, 8), errors.StructureUnsupported, "no tensor"),
        (lambda x: x @ x, (1, 8), errors.SizeExcluded, "test_export.py:"),
    ],
)
def test_models_that_cannot_be_exported(
    function: Callable[..., Any], sizes: tuple[int, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        exported(function, batch=sizes)
    assert said in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dimension_that_touches_no_shape() -> None:
    with pytest.raises(errors.DimensionUnused, match="'seq' changes no shape"):
        exported(Batched(torch.relu), lambda batch, seq: torch.rand(batch, 4), batch=(1, 2), seq=(3,))


def test_a_size_that_is_no_line() -> None:
    with pytest.raises(errors.ShapeIrregular, match="axis 0: sizes"):
        exported(Batched(torch.relu), lambda batch: torch.rand(batch * batch, 4), batch=(1, 3))
    with pytest.raises(errors.ShapeIrregular, match="axis 0: sizes"):
        exported(Batched(torch.relu), lambda batch, seq: torch.rand(batch * seq, 4), batch=(2, 3), seq=(2, 3))


def test_inputs_are_drawn_alike_each_time() -> None:
    source = load_source(Batched(torch.relu), rows)
    before = torch.random.get_rng_state()
    first, second = sample(source, {"batch": 3}).tensors[0], sample(source, {"batch": 3}).tensors[0]
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random state is left alone"


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.seen


class Writer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (Counter(), "mutated-buffer"),
        (Writer(), "mutated-input"),
        (nn.Dropout(), "random-operation"),
        (Batched(lambda x: x + torch.rand_like(x)), "random-operation"),
    ],
    ids=["buffer", "input", "dropout", "rand"],
)
def test_what_cannot_be_replayed_faithfully_is_refused(model: nn.Module, rule: str) -> None:
    findings = check(exported(model))
    assert rule in {finding.rule for finding in findings}
    with pytest.raises(errors.Refused, match=rule):
        refuse(findings, strict=False, waive=[])


@pytest.mark.parametrize("model", [nn.Dropout().eval(), nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()])
def test_dropout_outside_training_draws_nothing(model: nn.Module) -> None:
    refuse(check(exported(model)), strict=True, waive=[])


@pytest.mark.parametrize("target", ["cpu", "auto"])
@pytest.mark.parametrize("lower", ["eager", "max-autotune"])
def test_the_cpu_target_does_not_ignore_a_lowering_it_lacks(target: str, lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose(target, "inductor").target == "cpu"
    with pytest.raises(errors.TargetUnavailable, match="the cpu target has one lowering"):
        choose(target, lower)


def test_a_saved_program_is_a_source(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt2"
    dims = ({0: torch.export.Dim("batch", max=64)},)
    torch.export.save(torch.export.export(nn.Linear(4, 2).eval(), (torch.rand(3, 4),), dynamic_shapes=dims), path)
    source = load_source(str(path))
    assert (source.name, source.dimensions) == ("saved", ("batch",))
    made = export(source, {"batch": (1, 8)})
    assert made.inputs[0].shape == ("batch", 4)
