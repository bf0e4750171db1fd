"""The command line without torch: help, streams, exit codes, and damaged and hostile bundles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cgbundle import self_test
from cgbundle.errors import CgbundleError, OutOfMemory
from cgbundle.format import file_names
from cgbundle.format.schema import VERSION, Finding, Manifest
from cgbundle.self_test import Compared
from cgcompile.bundle import manifest_text
from cgcompile_cli import errors, main, output
from cgcompile_cli import int_keys as keys
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.places import ROOT

COMMANDS = (
    "build",
    "check",
    "inspect",
    "verify",
    "sign",
    "run",
    "serve",
    "bench",
    "diff",
    "sizes",
    "explain",
    "targets",
    "operators",
    "doctor",
    "push",
    "pull",
    "cache",
)
ON_A_BUNDLE = ("inspect", "verify", "run", "bench")


def call(*arguments: object) -> Result:
    """Runs a command as the shell would, 80 columns wide."""
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "80"})


def refused(result: Result, code: int) -> str:
    """Returns the line of an expected error. Checks the exit code, that stdout is empty, and that at most a hint follows."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest), result.stderr
    return first


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tiny_bundle.write_bundle(tmp_path / "tiny.cgb")


# --- help and usage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), *[(command,) for command in COMMANDS]])
def test_help_fits_80_columns(arguments: tuple[str, ...]) -> None:
    result = call(*arguments, "--help")
    assert result.exit_code == 0 and result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.isascii() and "..." not in result.stdout.partition("Commands:")[2]


def test_help_lists_every_command() -> None:
    listed = call("--help").stdout.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in listed if line.strip()] == list(COMMANDS)


def test_version() -> None:
    result = call("--version")
    assert result.exit_code == 0 and result.stdout == f"cgcompile 0.1.0 (bundle format {VERSION})\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("bild",), ("build",), ("build", "m.py", "--lower", "hard"), ("build", "m.py", "--max-keys", "0"), ("inspect",),
        ("inspect", "--nonsense"), ("verify", "a", "b"),
    ],
)  # fmt: skip
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    refused(result, 2)
    assert result.stderr.splitlines()[1].startswith("hint: cgcompile ") and result.stderr.endswith(" --help\n")


def test_nothing_typed_shows_the_help() -> None:
    for arguments in ((), ("cache",)):
        result = call(*arguments)
        assert result.exit_code == 2 and "Usage: cgcompile" in result.stderr and "Commands:" in result.stderr


def test_a_mistyped_option_is_told_with_the_right_one() -> None:
    assert refused(call("build", "m.py", "--size", "1"), 2) == "error: no such option: --size (did you mean --sizes?)"
    assert refused(call("build", "m.py", "--nonsense"), 2) == "error: no such option: --nonsense"
    assert refused(call("bild"), 2) == "error: no such command 'bild'. Did you mean 'build'?"
    assert refused(call("build", "m.py", "--sizes"), 2) == "error: option '--sizes' requires an argument"


# --- paths without a bundle, or with one of another version --------------------------------------------------------


@pytest.mark.parametrize("command", ON_A_BUNDLE)
def test_path_is_no_bundle(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    assert "no such bundle" in refused(call(command, tmp_path / "missing.cgb"), 2)
    assert "a file, not a bundle directory" in refused(call(command, tmp_path / "file"), 2)
    assert "a directory without manifest.json" in refused(call(command, tmp_path / "folder"), 2)


@pytest.mark.parametrize("command", ON_A_BUNDLE)
def test_newer_format(command: str, tmp_path: Path) -> None:
    path = tiny_bundle.write_bundle(tmp_path / "new.cgb", lambda manifest: replace(manifest, version=99))
    assert "version 99 of the format" in refused(call(command, path), 2)


@pytest.mark.parametrize("command", ON_A_BUNDLE)
def test_a_format_before_the_first(command: str, bundle: Path) -> None:
    path = bundle / file_names.MANIFEST
    path.write_text(path.read_text().replace(f'"version":{VERSION}', '"format":6'))
    assert "build the bundle again" in refused(call(command, bundle), 2)


@pytest.mark.parametrize("command", ("inspect", "run"))
def test_damaged_manifest(command: str, bundle: Path) -> None:
    flip(bundle / file_names.MANIFEST)
    refused(call(command, bundle), 1)


def test_unreadable_manifest_is_one_line(bundle: Path) -> None:
    (bundle / file_names.MANIFEST).unlink()
    (bundle / file_names.MANIFEST).mkdir()
    assert "its manifest.json is not a file" in refused(call("inspect", bundle), 2)


# --- inspect ------------------------------------------------------------------------------------------------------


def test_inspect_shows_one_screen(bundle: Path) -> None:
    result = call("inspect", bundle)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) <= 30 and not any(line.endswith(" ") for line in lines)
    expected = (
        "to run: torch 2.11 or newer",
        "[batch, 3]",
        "2 int_keys",
        "first.bias = tied.bias",
        "1.0e-07",
        "host/model.so",
        "tiny.py",
    )
    assert [text for text in expected if text not in result.stdout] == []
    assert f"cgbundle.load({str(bundle)!r})" in result.stdout


def test_inspect_json(bundle: Path) -> None:
    answer = json.loads(call("inspect", bundle, "--json").stdout)
    assert answer["int_keys"] == [[1], [4]]
    assert answer["weights"] == {"names": 3, "bytes": 32, "tied": [["first.bias", "tied.bias"]]}
    assert answer["manifest"] == json.loads((bundle / file_names.MANIFEST).read_text())
    assert answer["bytes"] == sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())


def test_inspect_graph(bundle: Path) -> None:
    shown = call("inspect", bundle, "--graph", "4").stdout
    assert "batch=4" in shown and "host/model.so" in shown and "input x" in shown
    assert json.loads(call("inspect", bundle, "--graph", "4", "--json").stdout)["key"] == [4]
    assert "no int_key '3': the bundle has 1, 4" in refused(call("inspect", bundle, "--graph", "3"), 2)


def test_inspect_shows_findings_and_allowed_rules(tmp_path: Path) -> None:
    finding = Finding(
        rule="cpu-sync",
        severity="host",
        message="item() waits",
        node="item",
        where="m.py:3",
        source="x.item()",
        effect="a host region",
        fix="keep it",
    )
    path = tiny_bundle.write_bundle(
        tmp_path / "w.cgb", lambda manifest: edited(manifest, findings=(finding,), allowed=("other-rule",))
    )
    shown = call("inspect", path).stdout
    for text in ("host cpu-sync: item() waits (m.py:3)", "fix: keep it", "other-rule"):
        assert text in shown


def test_hostile_texts_cannot_drive_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07[red]\u202etxt\n"

    def change(manifest: Manifest) -> Manifest:
        origin = replace(manifest.provenance, source=evil, machine=evil)
        return replace(manifest, name="[red]", provenance=origin)

    path = tiny_bundle.write_bundle(tmp_path / "evil.cgb", change)
    for arguments in (("inspect", path), ("inspect", path, "--json"), ("inspect", path, "--graph", "1"), ("verify", path)):
        shown = call(*arguments).output
        assert all(letter == "\n" or letter.isprintable() for letter in shown)
    assert r"\x1b]0;owned\x07[red]\u202etxt\n" in call("inspect", path).stdout


def test_hostile_names_are_refused_in_a_line_that_cannot_drive_the_terminal_either(tmp_path: Path) -> None:
    path = tiny_bundle.write_bundle(tmp_path / "evil.cgb", lambda manifest: replace(manifest, name="\x1b]0;owned\x07\n"))
    for command in ("inspect", "verify"):
        result = call(command, path)
        assert result.exit_code == 1 and "is not printable" in result.output
        assert all(letter == "\n" or letter.isprintable() for letter in result.output)


@pytest.mark.parametrize(("text", "key"), [("4", (4,)), ("batch=4", (4,)), ("1", (1,))])
def test_keys_as_typed(text: str, key: tuple[int, ...]) -> None:
    assert keys.parse(tiny_bundle.manifest().entries[0], text) == key


@pytest.mark.parametrize("text", ["", "-", "x", "4x4", "seq=4", "batch=", "batch=4,batch=4", "batch=4,seq=1"])
def test_keys_that_are_none(text: str) -> None:
    with pytest.raises(CgbundleError, match="no int_key|no dimension 'seq'"):
        keys.parse(tiny_bundle.manifest().entries[0], text)


# --- verify -------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int = -2) -> None:
    """Flips a bit of the byte at `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_verify_sound(bundle: Path) -> None:
    result = call("verify", bundle)
    assert result.exit_code == 0 and result.stderr == "" and "every hash and invariant holds" in result.stdout
    answer = json.loads(call("verify", bundle, "--json").stdout)
    assert answer == {"path": str(bundle), "ok": True, "damage": [], "signature": None, "self_test": None}


@pytest.mark.parametrize(
    "name", [file_names.MANIFEST, file_names.WEIGHTS, file_names.SELF_TEST, file_names.PROGRAM, tiny_bundle.HOST_FILE]
)
@pytest.mark.parametrize("at", [0, 100, -1])
def test_verify_finds_a_flipped_byte(bundle: Path, name: str, at: int) -> None:
    flip(bundle / name, at)
    result = call("verify", bundle)
    assert result.exit_code == 1 and f"{bundle}: 1 defect" in result.stderr, result.output
    assert len(result.stdout.splitlines()) == 1 and len(result.stderr.splitlines()) == 2


def test_verify_finds_all_damage(bundle: Path) -> None:
    (bundle / file_names.PROGRAM).unlink()
    (bundle / "stranger").write_text("")
    with open(bundle / file_names.WEIGHTS, "ab") as file:
        file.truncate(file.tell() - 3)
    flip(bundle / file_names.SELF_TEST)
    result = call("verify", bundle)
    assert result.exit_code == 1 and "4 defects" in result.stderr
    for text in (
        "program.pt2: missing",
        "stranger: not named",
        "weights.safetensors: 285 bytes",
        "exam.safetensors: SHA-256",
    ):
        assert text in result.stdout
    answer = json.loads(call("verify", bundle, "--json").stdout)
    assert not answer["ok"] and [defect["code"] for defect in answer["damage"]] == ["file-damaged"] * 4
    assert set(answer["damage"][0]) == {"code", "message", "where", "fix"}


def test_verify_wants_a_self_test_for_every_key(bundle: Path) -> None:
    tensors = tiny_bundle.self_test_tensors()
    del tensors["4/output/0"]
    with open(bundle / file_names.SELF_TEST, "wb") as file:
        tiny_bundle.safetensors_files.write(file, tensors)
    tiny_bundle.seal(bundle, replace(tiny_bundle.manifest(), files=manifest_text.describe_files(str(bundle))))
    result = call("verify", bundle)
    assert result.exit_code == 1 and "tensor '4/output/0' is missing" in result.stdout


def test_verify_run_reports_what_the_fresh_process_says(bundle: Path) -> None:
    result = call("verify", bundle, "--run")  # the shared object is a dummy, or libtorch is missing
    assert result.exit_code in (1, 2) and "every hash" in result.stdout and result.stderr.startswith("error: ")


def test_verify_run_names_the_output_that_failed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "3 of 8 values differ, first at [2]: 17, expected 12"
    fine = Compared(title="output 0 (float32)", error=1e-7, bound=1e-5, exact=False, text="")
    wrong = Compared(title="output 1 (int64)", error=0.375, bound=0.0, exact=False, text=text)
    lost = Compared(title="state cache (float32)", error=float("inf"), bound=1e-5, exact=False, text="1 of 1 values differ")
    results = [
        self_test.Result(entry="forward", key=key, tensors=rows) for key, rows in (((1,), (fine,)), ((4,), (fine, wrong, lost)))
    ]

    def fresh(path: str, keys: object = ()) -> dict[str, object]:
        return {"results": [result.plain("tolerance") for result in results], "torch_imported": False, "exit_code": 1}

    monkeypatch.setattr(self_test, "fresh", fresh)
    result = call("verify", bundle, "--run")
    assert result.exit_code == 1 and "self-test failed for batch=4" in result.stderr
    assert f"batch=4: output 1 (int64): {text}" in result.stdout and "batch=4: state cache (float32): 1 of 1" in result.stdout
    assert "output 0" not in result.stdout and "equal" in result.stdout
    answers = json.loads(call("verify", bundle, "--run", "--json").stdout)["self_test"]["results"]
    assert [tensor["passed"] for tensor in answers[1]["tensors"]] == [True, False, False]
    assert answers[1]["tensors"][2]["error"] == "inf"


# --- run ----------------------------------------------------------------------------------------------------------


def test_run_refuses_what_does_not_fit(bundle: Path, tmp_path: Path) -> None:
    assert "cannot be used with --inputs" in refused(call("run", bundle, "--size", "1", "--inputs", "x"), 2)
    assert "no int_key '9'" in refused(call("run", bundle, "--size", "9"), 2)
    assert "No such file" in refused(call("run", bundle, "--inputs", tmp_path / "missing"), 2)
    (tmp_path / "text").write_text("no tensors here, but enough text")
    assert "header" in refused(call("run", bundle, "--inputs", tmp_path / "text"), 2)
    (tmp_path / "empty").write_text("")
    assert "header" in refused(call("run", bundle, "--inputs", tmp_path / "empty"), 2)
    assert "no tensor 'x'; it holds first.bias, first.weight" in refused(
        call("run", bundle, "--inputs", bundle / file_names.WEIGHTS), 2
    )


# --- exceptions and output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OutOfMemory("out-of-memory", "two\nlines", "and\na hint"), 2, "error: two lines\nhint: and a hint\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (PermissionError(13, "Permission denied", "a\x1bb"), 2, "error: a\\x1bb: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
    ],
)
def test_exceptions_become_text(error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(main.typer.Exit) as caught, errors.as_text([]):
        raise error
    assert caught.value.exit_code == code
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize("error", [ValueError("a bug"), FileNotFoundError("no path: a bug"), OSError(22, "Invalid argument", "x")])
def test_bugs_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), errors.as_text([]):
        raise error


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1048575, "1.0 MiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes(number: int, text: str) -> None:
    assert output.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.000035, "35 us"), (0.0012, "1.2 ms"), (0.214, "0.21 s"), (24.31, "24.3 s"), (125.2, "2 min 05 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


# --- what a process imports ---------------------------------------------------------------------------------------

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in {"torch", "triton", "numpy", "safetensors", "click"}
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
sys.argv = ["cgcompile", *sys.argv[1:]]
from cgcompile_cli.main import main
main()
"""


def without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths, "FORCE_COLOR": "1", "COLUMNS": "40"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_bundles_are_read_without_torch_and_written_without_control_codes(bundle: Path) -> None:
    done = without_torch("inspect", bundle)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "rows do not depend on each other" in done.stdout, "piped lines are not broken"


def test_build_names_the_missing_extra(tmp_path: Path) -> None:
    done = without_torch("build", tmp_path / "model.py", "--sizes", "1")
    assert done.returncode == 2 and done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ") and second == "hint: pip install 'torch>=2.11,<2.14' 'triton>=3.6,<3.8' numpy"
