"""The catalogue of errors: every class says what it means, what it returns to the shell, is raised somewhere, and provoked by a
test."""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from pathlib import Path

import pytest

import cgbundle
from cgbundle import errors
from cgbundle.errors import CATALOGUE, CallError, CgbundleError, OutOfMemory
from cgcompile.errors import BuildError, ModelError
from cgcompile_cli.errors import hint as spelled
from tests.helpers.places import ROOT

PACKAGE = Path(inspect.getfile(cgbundle)).parent

CATALOGUES = (
    "cgbundle.errors", "cgcompile.errors", "cgcompile.partition.errors", "cgcompile.capture.errors", "cgcompile.offline.errors",
    "cgcompile_cli.errors",
)  # fmt: skip
"""Where classes of errors may be: nowhere else."""

SOURCES = ("bundles/cgbundle", "cgcompile", "cli/cgcompile_cli")

BY_MESSAGE = {
    "SourceMissing": "tests/cpu/pipeline/test_bad_input.py::test_no_model",
    "SourceInvalid": "tests/cpu/pipeline/test_bad_input.py::test_model_file",
    "TooManyKeys": "tests/cpu/pipeline/test_bad_input.py::test_ten_thousand_keys",
    "Usage": "tests/pure/cli/test_help.py::test_quiet_and_verbose_exclude_each_other",
    "BenchFailed": "tests/cpu/tools/test_bench.py::test_a_bundle_that_this_machine_cannot_run_is_the_environments_fault",
    "OutputUnwritable": "tests/cpu/pipeline/test_bad_input.py::test_unwritable_directory",
}
"""Tests that provoke an error through a command, where its text is all that is seen: they do not name the class."""


def classes(module: str) -> list[type[CgbundleError]]:
    """The classes that a catalogue defines."""
    found = vars(importlib.import_module(module)).values()
    return [each for each in found if inspect.isclass(each) and issubclass(each, CgbundleError) and each.__module__ == module]


CLASSES = classes("cgbundle.errors")
ALL = [each for module in CATALOGUES for each in classes(module)]
DEFECTS = [each for each in ALL if not each.__name__.endswith("Error")]
"""All but the bases, which are raised nowhere themselves."""


@cache
def trees(folder: str) -> dict[Path, ast.Module]:
    """Every module below a folder."""
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))}


@cache
def made() -> set[str]:
    """Every name that the packages use in an expression outside a catalogue: an error is made where it is raised, returned to be
    raised, or handed to what raises it."""
    found = set()
    for folder in SOURCES:
        for path, tree in trees(folder).items():
            if path.name != "errors.py" or folder == "cli/cgcompile_cli":
                found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found


@cache
def named() -> set[str]:
    """Every name, attribute and text of one word in the tests, but for this file's own."""
    found = set()
    for path, tree in trees("tests").items():
        for node in ast.walk(tree) if path != Path(__file__) else ():
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return found


@pytest.mark.parametrize("kind", ALL)
def test_every_error_says_what_it_means(kind: type[CgbundleError]) -> None:
    assert kind.__doc__ and kind.__doc__.strip().endswith(".")
    assert kind.exit_code in (1, 2)
    assert "\n" not in kind.hint and not kind.hint.endswith(".")


def test_no_two_errors_have_one_name() -> None:
    """A recorder process tells its parent the name alone."""
    names = [each.__name__ for each in ALL]
    assert sorted(set(names)) == sorted(names)


def test_errors_are_defined_in_catalogues_alone() -> None:
    ours = {each.__name__ for each in ALL}
    for folder in SOURCES:
        for path, tree in trees(folder).items():
            for node in ast.walk(tree) if path.name != "errors.py" else ():
                if isinstance(node, ast.ClassDef):
                    assert not ours & {ast.unparse(base).rpartition(".")[2] for base in node.bases}, f"{path}: {node.name}"


@pytest.mark.parametrize("kind", DEFECTS)
def test_every_error_is_raised_somewhere(kind: type[CgbundleError]) -> None:
    assert kind.__name__ in made()


@pytest.mark.parametrize("kind", DEFECTS)
def test_every_error_is_provoked_by_a_test(kind: type[CgbundleError]) -> None:
    if kind.__name__ in BY_MESSAGE:
        path, _, function = BY_MESSAGE[kind.__name__].partition("::")
        assert f"def {function}(" in (ROOT / path).read_text()
    else:
        assert kind.__name__ in named(), f"{kind.__name__}: no test names it"


@pytest.mark.parametrize(
    ("error", "arguments", "hint"),
    [
        (
            BuildError("output-exists", "m.cgb: exists", "pass force=True"),
            ["build", "m.py"],
            "to replace it: cgcompile build m.py --force",
        ),
        (
            BuildError("too-many-keys", "100", "allow it with --max-keys 100"),
            ["build", "my model.py", "--sizes", "1"],
            "give fewer sizes, or: cgcompile build 'my model.py' --sizes 1 --max-keys 100",
        ),
        (
            ModelError("lowering-failed", "int_key (8,): no"),
            ["build", "--quiet", "m.py", "--sizes=1,8", "-o", "m.cgb", "--lower", "max-autotune", "--target", "cuda"],
            "cgcompile build --quiet m.py --sizes=1,8 -o m.cgb --lower max-autotune --target cuda --lower eager, "
            "or what to cut out: cgcompile check m.py --sizes=1,8 --target cuda",
        ),
        (
            ModelError("not-capturable", "int_key (8,): no"),
            ["build", "m.py", "--sizes", "batch=1", "--sizes", "seq=8", "--force", "-o", "m.cgb"],
            "it has to run in a host region; which operation it is: cgcompile check m.py --sizes batch=1 --sizes seq=8",
        ),
        (
            ModelError("operation-needs-gpu", "fft", "keep it on the host: cgcompile build ... --host-op aten.fft"),
            ["build", "m.py", "--sizes", "1"],
            "keep it on the host: cgcompile build m.py --sizes 1 --host-op aten.fft",
        ),
        (OutOfMemory("out-of-memory", "no", "free some"), ["run", "m.cgb"], "free some"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hints_repeat_what_the_user_typed(error: CgbundleError, arguments: list[str], hint: str) -> None:
    assert spelled(error, arguments) == hint


def test_a_wrong_call_is_the_callers_and_a_wrong_bundle_the_bundles() -> None:
    assert {each.exit_code for each in CLASSES if issubclass(each, CallError)} == {2}
    assert {each.__name__ for each in CLASSES if each.exit_code == 1 and each is not CgbundleError} == {
        "ManifestInvalid", "FileDamaged", "WeightsInvalid", "TableInvalid", "RelocationInvalid", "ExamFailed",
    }  # fmt: skip


def test_a_hint_is_the_classs_own_or_the_places() -> None:
    assert errors.CallError("stale-view", "x").hint == CATALOGUE["stale-view"].hint != ""
    assert errors.CallError("stale-view", "x", "y").hint == "y"
    assert (str(errors.CallError("x")), errors.CallError("x").hint) == ("x", "")


def test_nothing_in_the_runtime_catches_everything() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                assert caught not in ("everything", "Exception", "BaseException") or again, f"{path.name}:{node.lineno}"
