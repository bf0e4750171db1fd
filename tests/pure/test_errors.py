"""The catalogue of errors: every class says what it means, what it returns to the shell, and is raised somewhere."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import pytest

import cgbundle
from cgbundle import errors
from cgbundle.errors import CallError, CgbundleError

PACKAGE = Path(inspect.getfile(cgbundle)).parent
CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, CgbundleError)]
DEFECTS = [each for each in CLASSES if each not in (CgbundleError, CallError)]


@cache
def names_in_calls() -> set[str]:
    """Every name that is called in the package outside errors.py: an error is made where it is raised, or returned to be raised."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "errors.py":
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            found |= {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_says_what_it_means(kind: type[CgbundleError]) -> None:
    assert kind.__doc__ and kind.__doc__.strip().endswith(".")
    assert kind.exit_code in (1, 2)


@pytest.mark.parametrize("kind", DEFECTS)
def test_every_error_is_raised_somewhere(kind: type[CgbundleError]) -> None:
    assert kind.__name__ in names_in_calls()


def test_a_wrong_call_is_the_callers_and_a_wrong_bundle_the_bundles() -> None:
    assert {each.exit_code for each in CLASSES if issubclass(each, CallError)} == {2}
    assert {each.__name__ for each in DEFECTS if each.exit_code == 1} == {
        "ManifestInvalid", "FileDamaged", "WeightsInvalid", "TableInvalid", "RelocationInvalid", "ExamFailed",
    }  # fmt: skip


def test_a_hint_is_the_classs_own_or_the_places() -> None:
    assert errors.StaleView("x").hint == errors.StaleView.hint != ""
    assert errors.StaleView("x", "y").hint == "y"
    assert (str(errors.CallError("x")), errors.CallError("x").hint) == ("x", "")


def test_nothing_in_the_runtime_catches_everything() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                assert caught not in ("everything", "Exception", "BaseException") or again, f"{path.name}:{node.lineno}"
