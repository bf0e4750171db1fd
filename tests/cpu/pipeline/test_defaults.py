"""Defaults: a build calls eval() and needs no gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cgbundle
import cgcompile
from cgcompile.model.load import evaluated, load_source
from cgcompile.model.source import sample
from tests.helpers.raising import raises


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(4)))


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.ones(batch, 4),)


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_a_model_in_training_mode_is_put_into_eval_and_back() -> None:
    (model := network())[1].eval()
    before = modes(model)
    report = cgcompile.check(model, rows, sizes=[2, 4])
    assert report.mode == "left in training mode, put into eval() (--train keeps it)" and report.findings == ()
    assert modes(model) == before and len(set(before)) == 2
    kept = cgcompile.check(model, rows, sizes=[2, 4], train=True)
    assert kept.mode == "" and {"training-mode", "mutated-buffer"} <= {finding.rule for finding in kept.findings}


def test_a_model_that_is_in_eval_as_a_whole_stays_as_it_is() -> None:
    (model := network().eval())[1].train()
    with evaluated(load_source(model, rows), False) as said:
        assert said == "" and modes(model) == [False, False, True, False, False]


def test_a_module_of_export_has_no_modes() -> None:
    exported = torch.export.export(network().eval(), rows(2)).module()
    exported.training = True
    with evaluated(load_source(exported, rows), False) as said:
        assert said == ""


def test_an_eval_that_fails_is_told() -> None:
    class Broken(nn.Linear):
        def eval(self) -> Broken:
            raise RuntimeError("no eval today")

    with raises("source-invalid", match=r"test_defaults.py:\d+: eval\(\) failed: RuntimeError: no eval today"):
        cgcompile.check(Broken(4, 4), rows, sizes=[2])


def test_a_forgotten_no_grad_changes_nothing(bundle: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    for drawn in (lambda batch: (torch.ones(batch, 4, requires_grad=True),), lambda batch: (torch.ones(batch, 4) * weight,)):
        (tensor,) = sample(load_source(network(), drawn), {"batch": 2}).tensors
        assert not tensor.requires_grad and tensor.grad_fn is None
        assert cgcompile.check(network(), drawn, sizes=[2, 4]).findings == ()
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    with cgbundle.load(bundle) as program:
        expected, actual = program(x), program(x.clone().requires_grad_())
        assert torch.equal(expected, actual) and not actual.requires_grad


def test_errors_of_a_model_in_memory_name_the_users_line() -> None:
    def pairs(batch: int) -> tuple[object, ...]:
        return ((torch.ones(batch, 4),),)

    line = pairs.__code__.co_firstlineno
    with raises("eager-failed", match=r"returns a tuple for input; return a tensor if the model expects one: \(x,\) is one"):
        cgcompile.check(nn.Linear(4, 4), pairs, sizes=[2])
    text = rf"test_defaults.py:{line + 8}: inputs\(\) does not fit forward\(input\): 2 arguments by position, and it takes 1"
    with raises("source-invalid", match=text):
        cgcompile.check(nn.Linear(4, 4), lambda batch: (*rows(batch), *rows(batch)), sizes=[2])


class Named(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return ids * mask * scale


MISFITS = [
    (lambda t: {"ids": t, "msk": t}, "no parameter is called 'msk' (did you mean 'mask'?), 'mask' is missing"),
    (lambda t: ((t,), {"msk": t}), "no parameter is called 'msk' (did you mean 'mask'?), 'mask' is missing"),
    (lambda t: ((t, t), {"scal": 2.0}), "no parameter is called 'scal' (did you mean 'scale'?)"),
    (lambda t: ((), {"words": t, "mask": t}), "no parameter is called 'words', 'ids' is missing"),
    (lambda t: {"ids": t}, "'mask' is missing"),
    (
        lambda t: ((t, t), {"mask": t, "scal": 2.0}),
        "no parameter is called 'scal' (did you mean 'scale'?), 'mask' is given by position and by name",
    ),
    (lambda t: (t, t, 1.0, t), "4 arguments by position, and it takes 3"),
]


@pytest.mark.parametrize(("make_inputs", "text"), MISFITS, ids=range(len(MISFITS)))
def test_a_misspelt_argument_is_told_with_what_is_missing(make_inputs: Callable[[Tensor], object], text: str) -> None:
    with raises("source-invalid", match=re.escape(f"inputs() does not fit forward(ids, mask, scale=1.0): {text}") + "$"):
        sample(load_source(Named().eval(), lambda batch: make_inputs(torch.ones(batch, 4))), {"batch": 2})


@pytest.mark.parametrize("inputs", [5, "text", None])
def test_inputs_that_are_no_tensors(inputs: object) -> None:
    with raises("source-invalid", match=rf"test_defaults.py:\d+: inputs\(\) gave {type(inputs).__name__}, expected a tuple"):
        cgcompile.check(nn.Linear(4, 4), lambda batch: inputs, sizes=[2])
