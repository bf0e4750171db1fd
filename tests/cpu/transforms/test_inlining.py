"""Operators that a host region cannot call are replaced by their operations, with the same results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cgcompile.export.programs import Programs
from cgcompile.model.load import load_code, load_source
from cgcompile.transforms.inlining import code_of, custom_operators, inlined
from tests.helpers.raising import raises


@torch.library.custom_op("cgcompile_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("cgcompile_tests::doubled_and_one", mutates_args=())
def doubled_and_one(x: torch.Tensor) -> torch.Tensor:
    return doubled(x) + 1


@doubled_and_one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("cgcompile_tests::through_numpy", mutates_args=())
def through_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@through_numpy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.define("cgcompile_tests::elsewhere", "(Tensor x) -> Tensor")
torch.library.impl("cgcompile_tests::elsewhere", "CUDA", lambda x: x + 1)
torch.library.register_fake("cgcompile_tests::elsewhere", lambda x: torch.empty_like(x))
torch.library.define("cgcompile_tests::halved", "(Tensor x) -> Tensor")
torch.library.impl("cgcompile_tests::halved", "default", lambda x: doubled(x) / 4)
torch.library.register_fake("cgcompile_tests::halved", lambda x: torch.empty_like(x))
torch.library.define("cgcompile_tests::negated", "(Tensor x, *, float scale=1.0) -> Tensor")
torch.library.impl("cgcompile_tests::negated", "cpu", lambda x, scale=1.0: -x * scale)
torch.library.register_fake("cgcompile_tests::negated", lambda x, scale=1.0: torch.empty_like(x))


class Calling(torch.nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


WHOLE = torch.tensor([[3, 1, 1, 2], [2, 2, 3, 0]])


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (doubled, torch.randn(3, 4)),
        (doubled_and_one, torch.randn(3, 4)),
        (torch.ops.cgcompile_tests.halved, torch.randn(3, 4)),
        (lambda x: torch.ops.cgcompile_tests.negated(x, scale=3.0), torch.randn(3, 4)),
        (lambda x: torch.unique(x).sum(), WHOLE),
        (lambda x: torch.unique(x, return_inverse=True)[1], WHOLE),
        (lambda x: torch.unique(x, return_counts=True)[1].float().square().sum(), WHOLE),
        (lambda x: torch.unique_consecutive(x).sum(), WHOLE),
        (lambda x: torch.unique_consecutive(x, return_counts=True)[1].amax(), WHOLE),
        (lambda x: torch.unique_consecutive(x, return_inverse=True)[1], WHOLE),
        (lambda x: torch.bincount(x.reshape(-1)).amax(), WHOLE),
        (lambda x: torch.bincount(x.reshape(-1), minlength=9).float().norm(), WHOLE),
        (lambda x: torch.bincount(x.reshape(-1), weights=x.reshape(-1).float()).sum(), WHOLE),
    ],
    ids=[
        "custom",
        "nested",
        "of every device",
        "of the processor",
        "unique",
        "inverse",
        "counts",
        "runs",
        "run-lengths",
        "run-inverse",
        "bincount",
        "minlength",
        "weights",
    ],
)
def test_the_same_without_it(function: Callable[..., object], x: torch.Tensor) -> None:
    program = torch.export.export(Calling(function), (x,), strict=False)
    before = {str(node.target) for node in program.graph.nodes}
    inlined_program = inlined(program)
    after = {str(node.target) for node in inlined_program.graph.nodes}
    assert not custom_operators(inlined_program) and after != before
    assert not {"aten._unique2.default", "aten.unique_consecutive.default", "aten.bincount.default"} & after
    torch.testing.assert_close(inlined_program.module()(x), Calling(function)(x))


def test_what_inductor_lowers_stays() -> None:
    import torch.ao.quantization.fx._decomposed  # registers operators that PT2E uses

    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    program = torch.export.export(Calling(lambda x: quantize(x, 0.1, 3, 0, 255, torch.uint8)), (torch.randn(3),), strict=False)
    assert quantize in {node.target for node in program.graph.nodes}
    assert not custom_operators(program) and inlined(program) is program


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (through_numpy, "cgcompile_tests::through_numpy.*cannot be traced"),
        (torch.ops.cgcompile_tests.elsewhere, "cgcompile_tests::elsewhere.*runs on the host without Python"),
    ],
)
def test_what_cannot_be_traced_is_named(function: Callable[..., object], message: str) -> None:
    program = torch.export.export(Calling(function), (torch.randn(3),), strict=False)
    with raises("operator-without-code", match=message) as caught:
        inlined(program)
    assert "torch.library.custom_op" in caught.value.hint


def programs(function: Callable[..., object]) -> Programs:
    return Programs(by_key={(): torch.export.export(Calling(function), (torch.randn(3),), strict=False)}, dynamic=True)


LATE = """import torch


@torch.library.custom_op("late_package::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


tripled.register_fake(torch.empty_like)
"""


def test_a_package_that_the_model_imports_late_is_imported_by_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "late_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "unrelated.py").write_text("")
    (package / "operators.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("unrelated", "operators"):
        importlib.import_module(f"late_package.{name}")
    source = load_source(Calling(lambda x: torch.ops.late_package.tripled(x)), lambda: torch.ones(3))
    program = torch.export.export(source.model, (torch.ones(3),))
    code = code_of(source, Programs(by_key={(): program}, dynamic=False))
    assert code.splitlines()[1:] == ["late_package.operators"]
    load_code(code.splitlines()[1])


def test_a_model_of_a_script_cannot_bring_operators() -> None:
    program = programs(doubled)
    source = load_source(Calling(doubled), lambda: (torch.randn(3),))
    assert __name__ in code_of(source, program).splitlines()
    assert __name__ in code_of(replace(source, code=""), program).splitlines(), "the operator is of a module that can be imported"
    assert __name__ in code_of(replace(source, code=""), programs(torch.ops.cgcompile_tests.halved)).splitlines()
    assert code_of(source, programs(torch.relu)) == ""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(LATE.replace("late_package", "cgcompile_script"), script)
    with raises("operator-without-code", match="cgcompile_script::tripled: registered where"):
        code_of(replace(source, code=""), programs(script["tripled"]))
