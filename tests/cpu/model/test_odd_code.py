"""User code that raises in unexpected places: exceptions of the user's classes, objects that cannot be inspected, numbers that
Python reads. Every case gives a one-line error, or no error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgbundle.errors import CgbundleError
from cgcompile.model.tracing.attributes import changed, marks
from cgcompile.model.tracing.held_tensors import held_tensors
from cgcompile.model.user_code import call_user, plain_errors
from cgcompile_cli.output import complain
from tests.helpers.raising import raises


class NeedsArguments(Exception):
    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(one, two)


class NoException(BaseException):
    pass


class WithoutText(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = [NeedsArguments(1, two=2), NoException("of mine"), WithoutText(), SystemExit(3)]


class Raising(nn.Module):
    def __init__(self, error: BaseException, fails: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.error, self.fails = error, fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails(x):
            raise self.error
        return x + 1


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.rand(batch, 3),)


def check(model: nn.Module, make: Callable[..., Any] = inputs, **options: Any) -> cgcompile.Report:
    return cgcompile.check(model, make, sizes=[2, 4], target="cpu", **options)


@pytest.mark.parametrize("error", ERRORS, ids=lambda exception: type(exception).__name__)
def test_an_exception_of_the_models_own_is_told_with_its_line(error: BaseException) -> None:
    with raises("eager-failed", match=rf"test_odd_code.py:\d+: .*{type(error).__name__}"):
        check(Raising(error, lambda x: True))
    with raises("size-excluded", match=type(error).__name__):
        check(Raising(error, lambda x: x.shape[0] == 4))


@pytest.mark.parametrize("error", ERRORS, ids=lambda exception: type(exception).__name__)
def test_one_that_is_raised_while_the_model_is_probed_is_an_assertion(error: BaseException) -> None:
    assert [finding.rule for finding in check(Raising(error, lambda x: x.max() > 2)).findings] == ["asserted-value"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda exception: type(exception).__name__)
def test_an_exception_of_inputs(error: BaseException) -> None:
    def failing(batch: int) -> tuple[torch.Tensor]:
        raise error

    with raises("source-invalid", match=type(error).__name__):
        check(nn.Identity(), failing)


def test_interrupts_pass() -> None:
    for error in (KeyboardInterrupt(), GeneratorExit()):
        with pytest.raises(type(error)), plain_errors():
            raise error


def test_a_packages_own_error_has_the_users_line_beside_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages" / "someones"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def load(x):\n    return x['absent']\n")
    (tmp_path / "model.py").write_text("import someones\n\n\ndef model():\n    return someones.load({})\n")
    for path in (tmp_path, folder.parent):
        monkeypatch.syspath_prepend(str(path))
    import model  # type: ignore[import-not-found]

    with pytest.raises(CgbundleError) as caught:
        call_user(model.model, "model()", "model.py")
    assert "model.py:5: someones/__init__.py:2: model() failed: KeyError" in str(caught.value)
    assert caught.value.hint.startswith("someones raised this")


METHODS = ("len", "eq", "bool", "hash", "repr", "iter", "contains", "getattr", "getattribute", "reduce")


def odd(method: str) -> Any:
    """Returns an object whose method `method` raises."""

    def raising(self: Any, *arguments: Any) -> Any:
        raise ValueError(f"no {method} of mine")

    return type("Odd", (), {f"__{method}__": raising})()


class Holding(nn.Module):
    def forward(self, x: torch.Tensor, more: object = None) -> Any:
        return (x + 1, more) if more is not None else x + 1


@pytest.mark.parametrize("method", METHODS)
def test_an_object_that_cannot_be_looked_at(method: str) -> None:
    model = Holding()
    vars(model)["odd"] = odd(method)
    vars(model)["inside"] = {"one": [odd(method)]}
    vars(model)["table"] = [torch.ones(2)]
    assert [tensor.path for tensor in held_tensors(model)] == ["table.0"]
    assert {"odd", "inside", "table"} <= marks(model).keys() and marks(model) == marks(model)
    with raises("structure-unsupported", match=r"inputs\(\) gives"):
        check(Holding(), lambda batch: (torch.rand(batch, 3), odd(method)))


class Refusing(tuple[int, ...]):
    """A tuple whose length cannot be read, like e3nn's irreps."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError


class RefusingTable(dict[str, int]):
    def items(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def test_containers_that_refuse_questions_are_looked_into() -> None:
    model = Holding()
    vars(model).update(shape=Refusing((1, 2)), table=RefusingTable(one=1))
    before = marks(model)
    assert before == marks(model)
    vars(model).update(shape=Refusing((1, 3)), table=RefusingTable(one=2))
    assert changed(before, marks(model)) == ["shape", "table"]


def test_odd_objects_in_attributes_are_no_obstacle() -> None:
    model = Holding()
    for method in METHODS:
        if method != "getattribute":  # neither torch.nn.Module nor torch.export accepts such an object
            setattr(model, method, odd(method))
    assert check(model).findings == ()


class Listed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = x.argmax(1).tolist()
        return x * sum(places) + (1.0 if sorted(places)[0] > 1 else 2.0)


def test_a_list_of_numbers_that_python_sorts_is_refused_by_name() -> None:
    assert "data-dependent-branch" in [finding.rule for finding in check(Listed(), max_paths=8).findings]


PRINTS = """
import atexit, os, subprocess, sys
import torch
from torch import nn

def told(what):
    print("print", what)
    os.write(1, b"file descriptor 1\\n")
    sys.__stdout__.write("its own stdout\\n")
    subprocess.run(["echo", "a child"])

atexit.register(told, "at exit")
told("when imported")

class Printing(nn.Module):
    def forward(self, x):
        told("in forward()")
        return x + 1

def model():
    told("in model()")
    return Printing()

def inputs(batch):
    told("in inputs()")
    return (torch.rand(batch, 3),)
"""


def test_what_a_model_prints_goes_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PRINTS)
    command = [sys.executable, "-m", "cgcompile_cli", "check", "model.py", "--sizes", "1,2", "--target", "cpu", "--json", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["refused"] is False
    for what in ("when imported", "in model()", "in inputs()", "in forward()", "at exit", "file descriptor 1", "a child"):
        assert what in done.stderr
    assert done.stderr.count("its own stdout") == done.stderr.count("print ")


def test_a_long_refusal_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    complain("word " * 1000, "")
    stderr = capsys.readouterr().err
    assert len(stderr) < 900 and stderr.endswith("more characters (--json has all)\n") and stderr.count("\n") == 1
