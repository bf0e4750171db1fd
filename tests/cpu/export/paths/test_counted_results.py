"""Outputs with data-dependent sizes, in models whose Python code reads values: the program equals eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import cgbundle
import cgcompile
from cgcompile.errors import ModelError
from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported
from cgcompile.model.load import load_source
from cgcompile.model.side_effects import SIZE_FIX, WHILE_FIX
from tests.helpers.models import counting_models as models

SIZES = {"n": (3, 7)}


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4),)


def exported(model: nn.Module) -> Exported:
    exported_model = export(load_source(copy.deepcopy(model), rows), SIZES)
    refuse_branches(exported_model)
    return exported_model


def inputs(number: int) -> torch.Tensor:
    """Returns inputs of every declared size and of one between them. Of some the model selects no row, of some all rows."""
    torch.manual_seed(number)
    scale, shift = [1.0, 0.3, 3.0][number // 3 % 3], [0, -1, 1, -5, 5][number % 5]
    return torch.randn((3, 7, 5)[number % 3], 4) * scale + shift


def results(value: object) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]  # type: ignore[list-item]


BUILT = [
    models.Detector, models.Two, models.Measured, models.Halves, models.Sliced, models.Swapped, models.SwappedNumbers,
    models.Whole, models.Shrinking, models.Products, models.Twice, models.Unasked, models.Sums, models.Strongest,
]  # fmt: skip


@pytest.mark.parametrize("kind", BUILT)
def test_results_have_the_sizes_of_eager_pytorch(kind: Callable[[], nn.Module]) -> None:
    model = kind().eval()
    exported_model = exported(model)
    assert exported_model.programs.dynamic
    program, shapes = exported_model.programs.first.module(check_guards=False), set()
    for number in range(90):
        x = inputs(number)
        with torch.no_grad():
            wanted, outputs = results(model(x.clone())), program(x.clone())
        shapes.add(tuple([tuple(tensor.shape) for tensor in wanted]))
        assert [tensor.shape for tensor in outputs] == [tensor.shape for tensor in wanted]
        torch.testing.assert_close(list(outputs), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert len(shapes) > 2 or kind is models.SwappedNumbers


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (models.Flipped, r"the largest possible size of a selection: aten.flip.default \(.*counting_models.py:\d+\)"),
        (models.Ambiguous, r"the largest possible size of a selection: the assertion Ne\(\?, 0\) of sizes"),
        (models.Sized, r"counting_models.py:\d+: .*a number that is read out of a tensor is a size, or a position, in"),
        (models.Suppressing, r"counting_models.py:\d+: .*while order.shape\[0\] > 0"),
        (models.Constant, "one path returns float32 .*another path"),
    ],
)  # fmt: skip
def test_what_has_no_bound_is_refused_by_name(kind: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        exported(kind().eval())


def test_every_way_at_every_size() -> None:
    model = models.Groups().eval()
    exported_model = exported(model)
    assert not exported_model.programs.dynamic
    for rows_ in (3, 7):
        program = exported_model.programs.at((rows_,)).module(check_guards=False)
        for number in range(40):
            torch.manual_seed(number)
            x = torch.randn(rows_, 4)
            with torch.no_grad():
                torch.testing.assert_close(program(x)[0], model(x))


def test_the_largest_elements_with_nan() -> None:
    model = models.Strongest().eval()
    program = exported(model).programs.first.module(check_guards=False)
    for number in range(40):
        x = inputs(number)
        x.view(-1)[number % x.numel()] = float("nan")
        for want, got in zip(model(x), program(x), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


def test_a_size_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError) as caught:
        exported(models.Sized().eval())
    assert caught.value.hint == SIZE_FIX


def test_a_loop_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError) as caught:
        exported(models.Suppressing().eval())
    assert caught.value.hint == WHILE_FIX
    assert "torchvision.ops.nms" in caught.value.hint and "rk4" in caught.value.hint


def test_a_bundle_gives_them(tmp_path: Path) -> None:
    model = models.Detector().eval()
    cgcompile.build(copy.deepcopy(model), rows, sizes=SIZES, out=tmp_path / "detector.cgb", target="cpu")
    with cgbundle.load(tmp_path / "detector.cgb", on_miss="error") as program:
        for number in range(60):
            x = inputs(number)
            if len(x) == 5:
                continue
            with torch.no_grad():
                wanted = model(x)
            outputs = program(x)
            assert [tensor.shape for tensor in outputs] == [tensor.shape for tensor in wanted]
            torch.testing.assert_close(list(outputs), list(wanted), rtol=1e-4, atol=1e-5)
