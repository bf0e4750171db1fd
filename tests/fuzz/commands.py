"""The command line over a fuzzed bundle: what it prints is text, whatever the bundle's names are, and its errors are ours."""

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
    """The commands, made once: that takes longer than most of them."""
    return typer.main.get_command(main.app)


def command(arguments: list[str]) -> str:
    """How `cgcompile ARGUMENTS` ended: "exit 0", or "wrong: ..." for output that could drive a terminal or is not what it is said
    to be.  Raises what the command raises and does not foresee."""
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
    """The code of an error; "wrong: ..." for a message that is no printable line, or one that floods."""
    message = str(error)
    if not message.isprintable() or not error.hint.isprintable() or len(message) > 2100:
        return f"wrong: a message of {len(message)} characters: {message[:200]!r}"
    return error.code
