"""With --json every command writes its error to stdout as an object. The text on stderr and the exit status stay the same."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cgbundle import self_test
from cgbundle.catalogue import CATALOGUE
from cgbundle.errors import place
from cgbundle.format import file_names
from cgcompile_cli import errors, main
from cgcompile_cli.signals import Stopped
from tests.helpers.bundles import tiny_bundle


def call(*arguments: object) -> tuple[int, dict[str, Any], str]:
    """Returns the exit status, the error on stdout, and stderr."""
    result = CliRunner().invoke(main.app, [*map(str, arguments), "--json"], prog_name="cgcompile", env={"COLUMNS": "80"})
    answer = json.loads(result.stdout)
    assert list(answer) == ["error"] and list(answer["error"]) == ["code", "message", "where", "fix"]
    return result.exit_code, answer["error"], result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("build", "nosuch.py"), "source-missing"),
        (("check", "nosuch.py"), "source-missing"),
        (("inspect", "nosuch.cgb"), "bundle-missing"),
        (("verify", "nosuch.cgb"), "bundle-missing"),
        (("run", "nosuch.cgb"), "bundle-missing"),
        (("bench", "nosuch.cgb"), "bundle-missing"),
        (("diff", "nosuch.cgb", "other.cgb"), "bundle-missing"),
        (("sign", "nosuch.cgb", "--key", "nosuch.pem"), "system"),
        (("sizes", "nosuch.txt"), "request-log-missing"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_every_command_says_it_as_json(arguments: tuple[str, ...], code: str) -> None:
    status, error, stderr = call(*arguments)
    assert (status, error["code"]) == (2, code) and error["where"] == arguments[-1 if code == "system" else 1]
    assert stderr.startswith(f"error: {error['message']}\n") and (f"hint: {error['fix']}\n" in stderr) == bool(error["fix"])


def test_a_fix_repeats_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def model(): ...\ndef inputs(batch): ...\n")
    typed = ("build", str(tmp_path / "model.py"), "--sizes", "1,2,3", "--max-keys", "2")
    assert call(*typed)[1]["fix"] == f"give fewer sizes, or: cgcompile {shlex.join(typed)} --json --max-keys 3"


def test_damage_has_the_exit_status_1(tmp_path: Path) -> None:
    bundle = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    (bundle / file_names.MANIFEST).write_text("{")
    status, error, _ = call("inspect", bundle)
    assert (status, error["code"]) == (1, "manifest-invalid")


def test_a_self_test_that_this_machine_cannot_replay_is_an_error_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    answer = {"error": "the bundle is for sm_90: no GPU here", "hint": "", "code": "wrong-machine", "exit_code": 2}
    monkeypatch.setattr(self_test, "fresh", lambda path, keys=(): answer)
    status, error, stderr = call("verify", bundle, "--run")
    assert (status, error["code"], error["message"]) == (2, "wrong-machine", answer["error"])
    assert error["fix"] == CATALOGUE["wrong-machine"].hint and stderr.startswith(f"error: {answer['error']}\nhint: ")


def test_a_process_that_ends_without_an_answer_is_an_error_with_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    (tmp_path / "python").write_text("#!/bin/sh\necho 'free(): invalid pointer' >&2\nkill -ABRT $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    status, error, _ = call("verify", bundle, "--run")
    assert (status, error["code"], error["where"]) == (1, "self-test-crashed", str(bundle))
    assert error["message"].endswith("was killed by signal 6: free(): invalid pointer")


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (("bild",), "cgcompile --help"),
        (("build", "m.py", "--bogus"), "cgcompile build --help"),
        (("build", "m.py", "--max-keys", "0"), "cgcompile build --help"),
        (("run",), "cgcompile run --help"),
    ],
)
def test_what_no_command_takes(arguments: tuple[str, ...], fix: str) -> None:
    status, error, stderr = call(*arguments)
    assert (status, error["code"], error["fix"]) == (2, "usage", fix) and stderr.startswith("error: ")


@pytest.mark.parametrize(("error", "status", "said"), [(KeyboardInterrupt(), 130, "interrupted"), (Stopped(15), 143, "terminated")])
def test_an_interrupt(error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(main.typer.Exit) as caught, errors.as_text(["bench", "m.cgb", "--json"]):
        raise error
    assert caught.value.exit_code == status
    assert json.loads(capsys.readouterr().out)["error"] == {"code": "interrupted", "message": said, "where": "", "fix": ""}


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("model.py:12: model() failed: TypeError: no", "model.py:12"),
        ("sizes: batch=0 is not a positive whole number", "sizes"),
        ("graphs[2].nodes[17].grid: expected 3 ints, got 2", "graphs[2].nodes[17].grid"),
        ("no C++ compiler: 'g++' is not on the PATH", ""),
        ("interrupted", ""),
    ],
)
def test_the_place_in_a_message(message: str, where: str) -> None:
    assert place(message) == where


def test_a_path_with_a_blank_is_a_place_where_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "my model.py"
    assert place(f"{path}:3: no") == ""
    path.touch()
    assert place(f"{path}:3: no") == f"{path}:3"
