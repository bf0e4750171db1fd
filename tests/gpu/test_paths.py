"""Python branches on a GPU, captured and cross-compiled: a call takes the path that eager PyTorch takes."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle import CallError
from cgbundle.program.opening import MODES
from tests.helpers.models import path_models

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

import cgcompile  # noqa: E402

CLOSE = {"rtol": 2e-3, "atol": 2e-3}
DIFFERENT, TURNS = 200, 5
"""Number of inputs, and how often a program runs all of them, each time in another order."""

MODELS = ("EarlyReturns", "Breaks", "Numbers", "State", "Written", "Parts", "Best", "Again", "Nested", "Twelve")
RAISING = ("Numbers",)
"""Models that raise an error on some paths, so that the host reads a flag after the launch."""

TARGETS = ("captured", "cross-compiled")


def build(name: str, how: str, folder: Path) -> Path:
    model = getattr(path_models, name)().eval()
    options: dict[str, Any] = {"target": "sm_90"} if how == "cross-compiled" else {"target": "cuda", "record": "capture"}
    built = cgcompile.build(model, lambda: (path_models.rows(),), out=folder / "paths.cgb", **options)
    kinds = [step.kind for step in built.manifest.entries[0].programs[0].steps]
    assert kinds == ["graph", *(["copy", "host"] if name in RAISING else [])], f"one launch, then one flag for the host: {kinds}"
    return built.path


def outputs(call: Any, x: Any) -> list[Any] | str:
    """Returns the tensors of one call and its input, on the host; "raised" if the call raises."""
    try:
        result = call(x)
    except (CallError, AssertionError):
        return "raised"
    return [tensor.cpu() for tensor in (*(result if isinstance(result, tuple | list) else [result]), x)]


@pytest.mark.parametrize("how", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_call_takes_the_path_of_eager_pytorch(tmp_path: Path, name: str, how: str) -> None:
    path, order = build(name, how, tmp_path), random.Random(1)
    for mode in MODES:
        model, inputs = getattr(path_models, name)().eval().cuda(), path_models.calls(DIFFERENT) * TURNS
        order.shuffle(inputs)
        with cgbundle.load(path, mode=mode) as program, torch.no_grad():
            for number, x in enumerate(inputs):
                wanted, got = outputs(model, x.clone().cuda()), outputs(program, x.clone().cuda())
                assert (wanted == "raised") == (got == "raised"), f"{mode}, call {number}"
                if wanted != "raised":
                    about = f"{mode}, call {number}"
                    torch.testing.assert_close(
                        got, wanted, equal_nan=True, msg=lambda said, about=about: f"{about}: {said}", **CLOSE
                    )


@pytest.mark.parametrize("how", TARGETS)
def test_random_numbers_of_both_paths(tmp_path: Path, how: str) -> None:
    """In the first example of PyTorch's trees, the result of the branch is multiplied by numbers between 0 and 1."""
    path, factors = build("Foo", how, tmp_path), []
    for mode in MODES:
        with cgbundle.load(path, mode=mode) as program:
            program.seed(3)
            drawn = []
            for x in path_models.calls(DIFFERENT) * TURNS:
                x = x.cuda()
                y = x * x * x
                z = y**y if y.sum() > 0 else y.abs() ** y.abs()
                got = program(x)
                assert torch.equal(got.isnan(), z.isnan())
                drawn.append((got / z)[z.isfinite() & (z.abs() > 1e-6)].cpu())
            factors.append(torch.cat(drawn))
    assert torch.equal(factors[0], factors[1]), "one seed, the same numbers in both modes"
    assert factors[0].min() >= -1e-5 and factors[0].max() < 1 + 1e-5
    histogram = torch.histc(factors[0], 10, 0, 1) / len(factors[0])
    assert (histogram - 0.1).abs().max() < 0.01, histogram


@pytest.mark.parametrize("how", TARGETS)
def test_random_numbers_of_one_path_are_not_those_of_the_other(tmp_path: Path, how: str) -> None:
    path = build("Drawn", how, tmp_path)
    with cgbundle.load(path) as program:
        draws = []
        for sign in (1, -1, 1, 1, -1):
            program.seed(5)
            draws.append(program(sign * torch.ones(3, 4, device="cuda")).clone())
        assert torch.equal(draws[0], draws[2]) and torch.equal(draws[1], draws[4]) and not torch.equal(draws[0], draws[1])
        assert (draws[0] >= 1).all() and (draws[0] <= 3).all()
        assert not torch.equal(draws[3], program(torch.ones(3, 4, device="cuda")))


def test_a_data_dependent_size_before_the_branch(tmp_path: Path) -> None:
    """The selection of a mask is summed in the graph, at the size of the largest possible selection."""
    model = path_models.Chosen().eval()
    built = cgcompile.build(
        copy.deepcopy(model), lambda: (path_models.rows(),), out=tmp_path / "chosen.cgb", target="cuda", record="capture"
    )
    assert [step.kind for step in built.manifest.entries[0].programs[0].steps] == ["graph"]
    model.cuda()
    with cgbundle.load(built.path) as program:
        for x in path_models.calls(DIFFERENT):
            torch.testing.assert_close(program(x.cuda()), model(x.cuda()), **CLOSE)
