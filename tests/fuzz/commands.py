"""Runs the command line on a fuzzed bundle: its output must be printable text for any names, and its errors must be known."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import typer

from cgbundle.errors import CgbundleError
from cgcompile_cli import main


@cache
def _group() -> Any:
    """Returns the Typer commands. They are cached, because their creation takes longer than most commands."""
    return typer.main.get_command(main.app)


def command(arguments: list[str]) -> str:
    """Returns how `cgcompile ARGUMENTS` ended: "exit 0", or "wrong: ..." for output that could control a terminal or that has the
    wrong format. Raises every error that the command does not handle."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            _group().main(args=arguments, prog_name="cgcompile")
            status: object = 0
        except SystemExit as end:
            status = end.code
    for line in f"{out.getvalue()}\n{err.getvalue()}".split("\n"):
        if not line.isprintable():
            return f"wrong: {' '.join(arguments[:2])} prints {line[:200]!r}"
    if "--json" in arguments and out.getvalue():
        json.loads(out.getvalue())
    if status == 1 and not (out.getvalue() or err.getvalue()):
        return f"wrong: {' '.join(arguments[:2])} fails and says nothing"
    return f"exit {status}"


def shown(error: CgbundleError) -> str:
    """Returns the code of an error; "wrong: ..." if its message is not printable or too long."""
    message = str(error)
    if not message.isprintable() or not error.hint.isprintable() or len(message) > 2100:
        return f"wrong: a message of {len(message)} characters: {message[:200]!r}"
    return error.code
