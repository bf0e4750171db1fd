"""Help, examples, completion, --quiet and --verbose, and colours of the command line, without torch."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cgcompile.util.progress import Event
from cgcompile_cli import main
from cgcompile_cli.progress import watching
from tests.helpers.bundles import tiny_bundle
from tests.helpers.places import ROOT

GROUP = typer.main.get_command(main.app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]


def call(*arguments: object, columns: int = 80) -> Result:
    """Runs a command as the shell would."""
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env=environment)


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a new process that finds this source tree."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
    return (
        {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")} | {"PYTHONPATH": paths} | more
    )


def shell(*arguments: object, code: str = "from cgcompile_cli.main import main; main()", **more: str) -> str:
    """Returns the standard output of `cgcompile ARGUMENTS` in a new process, which must succeed and leave stderr empty."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_reads_well_in_80_columns(command: str) -> None:
    result = call(*filter(None, [command]), "--help")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and result.stderr == "" and result.stdout.isascii()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"Usage: cgcompile {command}".rstrip()) and "{" not in lines[0]
    said = lines[2]
    assert said.startswith("  ") and said.strip()[0].isupper(), "a sentence about what it does comes first"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_does(command: str) -> None:
    for parameter in GROUP.commands[command].params:  # type: ignore[attr-defined]
        said = parameter.help or ""
        assert said and said.endswith("."), f"{command} {parameter.name}: {said!r}"


def test_the_summaries_of_commands_are_not_cut() -> None:
    """In a process of its own: Click has two columns more under its test runner than in a terminal of 80 columns."""
    listed = shell("--help", COLUMNS="80").partition("Commands:")[2].split("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(GROUP.commands)  # type: ignore[attr-defined]
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


def examples() -> list[tuple[str, str]]:
    """Returns (command, line) for every line of a help text that is an example command."""
    texts = {command: GROUP.commands[command].help or "" for command in COMMANDS}  # type: ignore[attr-defined]
    lines = [(command, line.strip()) for command, text in texts.items() for line in text.splitlines()]
    return [(command, line) for command, line in lines if line.startswith("cgcompile ")]


@pytest.mark.parametrize(("command", "line"), examples())
def test_examples_in_help_can_be_typed(command: str, line: str) -> None:
    _, name, *arguments = shlex.split(line)
    assert name == command
    GROUP.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]  # parses, runs nothing


def test_help_has_examples() -> None:
    assert {"build", "check", "run"} <= {command for command, _ in examples()}


HEAVY = {"torch", "triton", "numpy", "rich", "safetensors", "asyncio", "cuda", "transformers"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_that_takes_time(command: str) -> None:
    """Help takes 0.1 s of processor time; importing torch alone takes 2 s."""
    code = "import atexit, sys\natexit.register(lambda: print(*sys.modules))\nfrom cgcompile_cli.main import main\nmain()"
    loaded = shell(*filter(None, [command]), "--help", code=code).splitlines()[-1].split()
    assert "cgcompile_cli.main" in loaded and not HEAVY & set(loaded)


# --- completion ---------------------------------------------------------------------------------------------------


def completed(line: str, folder: Path) -> list[str]:
    """Returns bash's completions of the last word of `line`."""
    before = len(shlex.split(f"{line}.")) - 1  # the last word may be empty
    output = shell(_CGCOMPILE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(before), HOME=str(folder))
    return output.split()


def test_completion_knows_commands_options_and_choices(tmp_path: Path) -> None:
    assert completed("cgcompile bu", tmp_path) == ["build"]
    assert set(COMMANDS) <= set(completed("cgcompile ", tmp_path))
    assert completed("cgcompile build --speci", tmp_path) == ["--specialize"]
    assert completed("cgcompile build --lower max", tmp_path) == ["max-autotune"]
    assert completed("cgcompile inspect ", tmp_path) == [], "a bundle's path is for the shell to complete"


def test_completion_knows_every_closed_set(tmp_path: Path) -> None:
    assert completed("cgcompile build m.py --target sm_1", tmp_path) == ["sm_100", "sm_120"]
    assert completed("cgcompile check m.py --target x86-64-v", tmp_path) == ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    assert completed("cgcompile bench m.cgb --against comp", tmp_path) == ["compile", "compile-warm"]
    assert completed("cgcompile bench m.cgb --against eager,o", tmp_path) == ["eager,ort"]
    assert "eager,eager" not in completed("cgcompile bench m.cgb --against eager,", tmp_path)
    assert completed("cgcompile build m.py --allow mismatched", tmp_path) == ["mismatched-integers"]
    assert "no-such-rule" not in (rules := completed("cgcompile build m.py --allow ", tmp_path)) and "host-scalar" in rules


def test_completion_knows_the_int_keys_of_the_bundle(tmp_path: Path) -> None:
    path = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    for option in ("run {} --size", "bench {} --size", "inspect {} --graph"):
        assert completed(f"cgcompile {option.format(shlex.quote(str(path)))} ", tmp_path) == ["1", "4"]
        assert completed(f"cgcompile {option.format(shlex.quote(f'{tmp_path}/nowhere.cgb'))} ", tmp_path) == []


def test_completion_scripts_are_shown_and_installed(tmp_path: Path) -> None:
    shown = shell("--show-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _cgcompile_completion cgcompile" in shown, "paths are completed by the shell"
    output = shell("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "bash completion installed in" in output
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "_CGCOMPILE_COMPLETE" in script.read_text() and script.name in (tmp_path / ".bashrc").read_text()


# --- quiet and verbose --------------------------------------------------------------------------------------------

EVENTS = (
    Event(stage="lower", state="start", text="", seconds=0.0),
    Event(stage="lower", state="detail", text="1 of 2 kernels", seconds=0.5),
    Event(stage="lower", state="detail", text="2 of 2\x1b kernels", seconds=1.25),
    Event(stage="lower", state="done", text="2 kernels", seconds=1.5),
)


def watched(capsys: pytest.CaptureFixture[str], *options: bool) -> list[str]:
    """Returns the lines that a build writes while EVENTS happen."""
    with watching(*options) as progress:
        for event in EVENTS:
            if progress is not None:
                progress(event)
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_line_for_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched(capsys, False) == ["lower             ...  Inductor and its compilers", "lower          1.50 s  2 kernels"]


def test_verbose_has_a_line_for_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched(capsys, False, True) == [
        "lower             ...  Inductor and its compilers",
        "              +0.50 s    1 of 2 kernels",
        "              +1.25 s    2 of 2\\x1b kernels",
        "lower          1.50 s  2 kernels",
    ]


def test_quiet_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched(capsys, True) == []


def test_quiet_and_verbose_exclude_each_other() -> None:
    result = call("build", "missing.py", "--quiet", "--verbose")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr == "error: --quiet and --verbose cannot be used together\nhint: leave one of them out\n"


def test_verify_is_silent_about_a_sound_bundle_and_loud_about_a_damaged_one(tmp_path: Path) -> None:
    path = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    result = call("verify", path, "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    (path / "stranger").write_text("")
    result = call("verify", path, "--quiet")
    assert result.exit_code == 1 and "stranger" in result.stdout and "1 defect" in result.stderr


# --- colours ------------------------------------------------------------------------------------------------------


def on_a_terminal(*arguments: object, **more: str) -> str:
    """Returns what `cgcompile ARGUMENTS` writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "cgcompile_cli", *map(str, arguments)]
    variables = environment(COLUMNS="80", TERM="xterm-256color") | more
    process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # EIO: the process has closed its end
            break
        if not part:
            break
        output += part
    os.close(ours)
    process.wait()
    return output.decode()


def test_a_terminal_has_colours_unless_it_asked_for_none(tmp_path: Path) -> None:
    missing = tmp_path / "missing.cgb"
    coloured = on_a_terminal("inspect", missing)
    assert "\x1b[1;31merror: \x1b[0m" in coloured
    for more in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = on_a_terminal("inspect", missing, **more)
        assert plain.startswith("error: ") and "\x1b" not in plain and "no such bundle" in plain.replace("\r\n", "")
    path = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    assert "\x1b[" in on_a_terminal("inspect", path) and "\x1b" not in on_a_terminal("inspect", path, NO_COLOR="1")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_pipe_has_no_control_codes(command: str, tmp_path: Path) -> None:
    path = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    output = shell(command, path, FORCE_COLOR="1", CLICOLOR_FORCE="1", TERM="xterm-256color")
    assert output and "\x1b" not in output
