"""Commands in the console blocks of a page, and a check that their options exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from cgcompile_cli.main import app


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A line after `$`, and the output that the page shows below it ("" if none is shown; then none is checked)."""

    line: str
    shown: str


def commands(text: str) -> list[Command]:
    """Returns the commands of a console block. Every line of a `sh` block is a command."""
    pairs: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            pairs.append((line[2:], []))
        else:
            assert pairs, f"output before any command: {line}"
            pairs[-1][1].append(line)
    return [Command(line=line, shown="\n".join(shown)) for line, shown in pairs]


def words(line: str) -> tuple[dict[str, str], list[str]]:
    """Returns (variables, words) of a simple command line, without comments."""
    split = shlex.split(line, comments=True)
    variables = {}
    while split and re.fullmatch(r"[A-Z_]+=.*", split[0]):
        name, _, variables[name] = split.pop(0).partition("=")
    return variables, split


def is_simple(line: str) -> bool:
    """Tells whether a line calls `cgcompile` and needs no shell."""
    return words(line)[1][:1] == ["cgcompile"] and not re.search(r"[|&;<>*?~`]|\$\(", re.sub(r"'[^']*'", "", line))


def check_options(arguments: Sequence[str]) -> None:
    """Raises AssertionError if `cgcompile ARGUMENTS` has an option or a value that does not exist."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="cgcompile")
    rest, name = list(arguments), "cgcompile"
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name!r}"
    if rest in (["--version"], ["--help"]):
        return
    try:
        command.make_context(name, rest, parent=context)
    except Exception as error:  # noqa: BLE001 (Typer's errors have no public base)
        raise AssertionError(f"cgcompile {' '.join(arguments)}: {error}") from None


def as_check(arguments: Sequence[str]) -> list[str]:
    """Turns a `build` into a `check` of the same model: blocks that are too slow for every run are only checked."""
    kept = [arguments[1]]
    for option, value in zip(arguments[2:], [*arguments[3:], ""], strict=True):
        if option in ("--sizes", "--fallback-op"):
            kept += [option, value]
    return ["check", *kept, "--target", "cuda"]
