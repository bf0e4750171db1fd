"""The catalogues of errors: every code has a meaning and an exit status.

Every code is raised somewhere, with the class in its row of the catalogue, and a test provokes it.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cgbundle.catalogue
import cgbundle.errors
import cgcompile.errors
import cgcompile_cli.errors
from cgbundle.catalogue import CATALOGUE, Cause
from cgbundle.errors import CallError, CgbundleError, OutOfMemory, StateMissing
from cgcompile.errors import BuildError, ModelError, named
from cgcompile_cli.errors import hint as spelled
from tests.helpers.places import ROOT

PACKAGE = Path(inspect.getfile(cgbundle)).parent
CATALOGUES = (cgbundle.catalogue.CATALOGUE, cgcompile.errors.CATALOGUE, cgcompile_cli.errors.CATALOGUE)
ROWS = {code: row for catalogue in CATALOGUES for code, row in catalogue.items()}
SOURCES = ("bundles/cgbundle", "cgcompile", "cli/cgcompile_cli")

KINDS = {
    kind.__name__: kind
    for module in (cgbundle.errors, cgcompile.errors, cgcompile_cli.errors)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, CgbundleError)
}

CLASSES = {
    "CgbundleError", "BundleError", "MachineError", "OutOfMemory", "CallError", "ProgramClosed", "SessionBusy", "StateMissing",
    "EntryMissing", "BuildError", "ModelError", "UsageError",
}  # fmt: skip
"""Classes that callers catch."""

OWN_CODE = {"UsageError": ast.Constant("usage")}
"""Classes with one code, which their callers do not give."""

PASSED_ON = {
    ("cgcompile/util/workers.py", "self.kind.died"), ("cgcompile/util/workers.py", "died"),
    ("bundles/cgbundle/validate/bundle.py", "error.code"), ("bundles/cgbundle/validate/manifest.py", "error.code"),
    ("cgcompile/export/export.py", "error.code"), ("cgcompile/tools/transfer.py", "error.code"),
    ("cgcompile/export/paths/program.py", "code"), ("cgcompile/export/paths/program.py", "error.code"),
}  # fmt: skip
"""Places where an error gets its code from a caller or from another error: (file, variable)."""

BY_MESSAGE = {
    "source-missing": "tests/cpu/pipeline/test_bad_input.py::test_no_model",
    "source-invalid": "tests/cpu/pipeline/test_bad_input.py::test_model_file",
    "too-many-keys": "tests/cpu/pipeline/test_bad_input.py::test_ten_thousand_keys",
    "allow-unknown": "tests/pure/cli/test_at_once.py::test_a_wrong_argument_is_told_at_once",
    "usage": "tests/pure/cli/test_help.py::test_quiet_and_verbose_exclude_each_other",
    "bench-failed": "tests/cpu/tools/test_bench.py::test_a_bundle_that_this_machine_cannot_run_is_the_environments_fault",
    "output-unwritable": "tests/cpu/pipeline/test_bad_input.py::test_unwritable_directory",
}
"""Tests that provoke an error through a command. They see only its text, so they do not name the code."""


@cache
def trees(folder: str) -> dict[str, ast.Module]:
    """Returns every module below a folder, by its path."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_bytes()) for path in sorted((ROOT / folder).rglob("*.py"))}


def error_sites() -> Iterator[tuple[str, str, ast.expr | None]]:
    """Yields every place where the packages make an error: the file and line, the name of the class, and the code."""
    for folder in SOURCES:
        for path, tree in trees(folder).items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in CLASSES:
                    yield f"{path}:{node.lineno}", name, OWN_CODE.get(name) or (node.args[0] if node.args else None)


@cache
def texts() -> set[str]:
    """Returns every string in the tests, except those of this file."""
    return {
        node.value
        for path, tree in trees("tests").items()
        for node in ast.walk(tree)
        if path != "tests/pure/test_errors.py" and isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize(("code", "row"), ROWS.items(), ids=ROWS)
def test_every_code_says_what_it_means(code: str, row: Cause) -> None:
    assert re.fullmatch("[a-z]+(-[a-z]+)*", code)
    assert row.meaning.endswith(".") and len(row.meaning.split()) < 30
    assert row.exit_code in (1, 2)
    assert row.hint and "\n" not in row.hint and not row.hint.endswith(".")
    assert row.error in CLASSES and KINDS[row.error]._causes()[code] is row


def test_no_two_errors_have_one_code() -> None:
    """A recorder process passes only the code of an error to its parent, which finds the class by it."""
    assert len(ROWS) == sum(map(len, CATALOGUES))


def test_errors_are_defined_in_catalogues_alone() -> None:
    for folder in SOURCES:
        for path, tree in trees(folder).items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and CLASSES & {ast.unparse(base).rpartition(".")[2] for base in node.bases}:
                    assert path.endswith("/errors.py") and node.name in CLASSES, f"{path}: {node.name}"


def test_every_error_is_made_with_a_code_of_its_class() -> None:
    for place, name, code in error_sites():
        if isinstance(code, ast.Constant):
            assert code.value in ROWS and ROWS[code.value].error == name, f"{place}: {name}({code.value!r})"
        else:
            assert code is not None and (place.partition(":")[0], ast.unparse(code)) in PASSED_ON, f"{place}: {name}"


def test_every_code_that_is_asked_for_exists() -> None:
    for folder in SOURCES:
        for path, tree in trees(folder).items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "code":
                    for child in ast.walk(node):
                        assert not isinstance(child, ast.Constant) or child.value in ROWS, f"{path}:{node.lineno}: {child.value!r}"


def test_every_code_is_raised_somewhere() -> None:
    raised = {code.value for _, _, code in error_sites() if isinstance(code, ast.Constant)}
    workers = {
        argument.value.value
        for folder in SOURCES
        for tree in trees(folder).values()
        for argument in ast.walk(tree)
        if isinstance(argument, ast.keyword) and argument.arg == "died" and isinstance(argument.value, ast.Constant)
    }
    assert not ROWS.keys() - raised - workers


@pytest.mark.parametrize("code", ROWS)
def test_every_code_is_provoked_by_a_test(code: str) -> None:
    if code in BY_MESSAGE:
        path, _, function = BY_MESSAGE[code].partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")
    else:
        assert code in texts(), f"{code}: no test names it"


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
            "or find the operation: cgcompile check m.py --sizes=1,8 --target cuda",
        ),
        (
            ModelError("not-capturable", "int_key (8,): no"),
            ["build", "m.py", "--sizes", "batch=1", "--sizes", "seq=8", "--force", "-o", "m.cgb"],
            "the operation must run in a host region; to find it: cgcompile check m.py --sizes batch=1 --sizes seq=8",
        ),
        (
            ModelError("operator-without-kernel", "fft", "keep it on the host: cgcompile build ... --fallback-op aten.fft"),
            ["build", "m.py", "--sizes", "1"],
            "keep it on the host: cgcompile build m.py --sizes 1 --fallback-op aten.fft",
        ),
        (OutOfMemory("out-of-memory", "no", "free some"), ["run", "m.cgb"], "free some"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hints_repeat_what_the_user_typed(error: CgbundleError, arguments: list[str], hint: str) -> None:
    assert spelled(error, arguments) == hint


def test_a_wrong_call_is_the_callers_and_a_wrong_bundle_the_bundles() -> None:
    assert {row.exit_code for row in CATALOGUE.values() if issubclass(KINDS[row.error], CallError)} == {2}
    assert {code for code, row in CATALOGUE.items() if row.exit_code == 1} == {
        "manifest-invalid", "file-damaged", "image-invalid", "weights-invalid", "table-invalid", "relocation-invalid",
        "signature-missing", "signature-wrong", "self-test-crashed",
    }  # fmt: skip


def test_a_hint_is_the_codes_own_or_the_places() -> None:
    assert CallError("stale-view", "x").hint == CATALOGUE["stale-view"].hint != ""
    assert CallError("stale-view", "x", "y").hint == "y"
    assert str(CallError("key-missing", "x")) == "x"


@pytest.mark.parametrize(
    "error", [CallError("stale-view", "x"), StateMissing("state-missing", "no 'x'", "y"), ModelError("state-shared", "z")]
)
def test_an_error_crosses_processes_whole(error: CgbundleError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), named(error.code, str(error), error.hint)):
        assert type(again) is type(error)
        assert (again.code, str(again), again.hint) == (error.code, str(error), error.hint)


def test_a_traceback_ends_with_the_hint_and_the_message_alone_has_none() -> None:
    error = CallError("input-dtype", "input 'ids': expected dtype int64", "load with cast=True")
    *_, last, noted = "".join(traceback.format_exception(pickle.loads(pickle.dumps(error)))).splitlines()
    assert last.endswith("input 'ids': expected dtype int64") and noted == "hint: load with cast=True"
    assert str(error) == "input 'ids': expected dtype int64", "servers send it to their clients"


def test_a_kind_is_the_code_in_one_word() -> None:
    assert CallError("stale-view", "x").kind == "StaleView"
    locations = {"model.py:12: fails": "model.py:12", "no model: give one": "", "nothing": "", "a.cgb: exists": "a.cgb"}
    assert {text: CallError("stale-view", text).where for text in locations} == locations


def test_nothing_in_the_runtime_catches_everything() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                assert caught not in ("everything", "Exception", "BaseException") or again, f"{path.name}:{node.lineno}"
