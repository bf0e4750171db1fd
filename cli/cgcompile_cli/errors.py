"""Turns exceptions into a line with the error and its place, a `hint:` line, and the exit status.  With --json also writes an
object to stdout: `{"error": {"code": ..., "message": ..., "where": ..., "fix": ...}}`.

Commands do not catch exceptions.  Exceptions that `as_text` does not handle are bugs and keep their traceback.
"""

from __future__ import annotations

import difflib
import errno
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from cgbundle.catalogue import Cause
from cgbundle.errors import CgbundleError, place

from .output import complain, write_json
from .signals import Stopped

FINDINGS = 1
ENVIRONMENT = 2
INTERRUPTED = 130
"""Exit status: findings or failed verification; usage or environment; Ctrl-C.  For other signals it is 128 + the signal's
number."""

FORESEEN = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EIO,
})  # fmt: skip
"""Errors of the operating system about a path that the user named."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk or of a file that is too large.  Such an error may have no path."""


class UsageError(CgbundleError):
    """Options or a user's file that do not match the command."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__("usage", message, hint)

    @classmethod
    def _causes(cls) -> Mapping[str, Cause]:
        return CATALOGUE


CATALOGUE = {
    "usage": Cause(
        "UsageError", ENVIRONMENT, "Options or a file do not match the command.", "`cgcompile COMMAND --help` lists the options"
    )
}


PARSER_ERROR: Any = typer.BadParameter.__base__
"""Typer's error for invalid arguments.  Typer only exports its subclasses."""


@contextmanager
def as_text(arguments: Sequence[str]) -> Iterator[None]:
    """Runs a command with the user's `arguments`.  A foreseen error becomes text and typer.Exit with the exit status."""
    try:
        yield
    except CgbundleError as error:
        _write_error(arguments, error.code, str(error), hint(error, arguments))
        raise typer.Exit(error.exit_code) from None
    except Stopped as stopped:
        _write_error(arguments, "interrupted", str(stopped), "")
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        _write_error(arguments, "interrupted", "interrupted", "")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno not in FULL and (error.filename is None or error.errno not in FORESEEN):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        _write_error(arguments, "system", f"{where}{error.strerror}", "")
        raise typer.Exit(ENVIRONMENT) from None
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise  # no arguments: Typer shows the help
        command = error.ctx.command_path if error.ctx else "cgcompile"
        _write_error(arguments, "usage", _parser_message(error), f"{command} --help")
        raise typer.Exit(ENVIRONMENT) from None


def _parser_message(error: Any) -> str:
    """Returns the parser's message, with a lower-case first letter.  For an unknown option it names the most similar option."""
    text = str(error.format_message()).rstrip(".")
    if hasattr(error, "possibilities"):  # no such option
        suggestions = difflib.get_close_matches(error.option_name, error.possibilities or (), 1)
        text = f"no such option: {error.option_name}" + (f" (did you mean {suggestions[0]}?)" if suggestions else "")
    return text[:1].lower() + text[1:]


JSON = "--json"


def _write_error(arguments: Sequence[str], code: str, message: str, fix: str) -> None:
    complain(message, fix)
    if JSON in arguments:
        write_json({"error": as_object(code, message, fix)})


def as_object(code: str, message: str, fix: str) -> dict[str, str]:
    """Returns an error as the object for --json."""
    return {"code": code, "message": message, "where": place(message), "fix": fix}


COMMAND = "cgcompile build ..."
"""Placeholder for the user's command in hints of the library."""

CHECK_OPTIONS = ("--sizes", "--target", "--fallback-op", "--train")
"""Options of a build that `check` also takes."""


def hint(error: CgbundleError, arguments: Sequence[str]) -> str:
    """Returns the hint for `error`, with a command if the library's hint refers to Python or to the user's command."""
    spell = SPELLED.get(error.code)
    advice = spell(error, arguments) if spell else error.hint
    return advice.replace(COMMAND, again(arguments)) if arguments else advice


def again(arguments: Sequence[str], *more: str) -> str:
    """Returns the user's command with `more` appended."""
    return shlex.join(["cgcompile", *arguments, *more])


def _output_exists(error: CgbundleError, arguments: Sequence[str]) -> str:
    return error.hint if "--force" in arguments else f"to replace it: {again(arguments, '--force')}"


def _too_many_keys(error: CgbundleError, arguments: Sequence[str]) -> str:
    limit = error.hint.rpartition(" ")[2]  # "... --max-keys 100"
    return f"give fewer sizes, or: {again(arguments, '--max-keys', limit)}"


def _lowering_failed(error: CgbundleError, arguments: Sequence[str]) -> str:
    if COMMAND in error.hint:
        return error.hint
    command = f"{again(arguments, '--lower', 'eager')}, or find the operation: {_check(arguments)}"
    return error.hint if "eager" in arguments else command


def _not_capturable(error: CgbundleError, arguments: Sequence[str]) -> str:
    return f"the operation must run in a host region; to find it: {_check(arguments)}"


def _check(arguments: Sequence[str]) -> str:
    """Returns the `cgcompile check` command with the model and sizes of a build."""
    words = [word for position, word in enumerate(arguments[1:], 1) if _is_check_word(arguments, position)]
    return shlex.join(["cgcompile", "check", *words])


def _is_check_word(arguments: Sequence[str], position: int) -> bool:
    word, previous = arguments[position], arguments[position - 1]
    if word.startswith("-"):
        return word.partition("=")[0] in CHECK_OPTIONS
    return previous in CHECK_OPTIONS or not (previous.startswith("-") and previous not in FLAGS and "=" not in previous)


FLAGS = ("--strict", "--train", "--force", "--quiet", "-q", "--verbose", "-v", "--json")
"""Options of a build without a value."""

SPELLED: dict[str, Callable[[CgbundleError, Sequence[str]], str]] = {
    "output-exists": _output_exists,
    "too-many-keys": _too_many_keys,
    "lowering-failed": _lowering_failed,
    "not-capturable": _not_capturable,
}
"""Functions that return a hint with the user's command, by error code."""
