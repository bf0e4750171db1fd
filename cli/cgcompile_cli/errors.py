"""The one place where exceptions become text: one line that says what and where, a `hint:` line, and the exit code.  With --json
also an object on stdout: `{"error": {"code": ..., "message": ..., "where": ..., "fix": ...}}`.

Commands do not catch.  What is not listed here is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from cgbundle.errors import Cause, CgbundleError, place

from .output import complain, write_json
from .signals import Stopped

FINDINGS = 1
ENVIRONMENT = 2
INTERRUPTED = 130
"""Exit status: the model or bundle has findings or fails verification; usage or environment; Ctrl-C.  Another signal's is 128 and
its number."""

FORESEEN = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EIO,
})  # fmt: skip
"""What the operating system may say about a path that the user named."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk is full, or the file larger than it may be: such an error need not name a path."""


class UsageError(CgbundleError):
    """Options or a file of the user's that do not fit the command."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__("usage", message, hint)


UsageError.catalogue = {
    "usage": Cause(
        UsageError, ENVIRONMENT, "Options or a file do not match the command.", "`cgcompile COMMAND --help` lists the options"
    )
}


PARSER_ERROR: Any = typer.BadParameter.__base__
"""What Typer raises for arguments that no command takes: it exports subclasses alone."""


@contextmanager
def as_text(arguments: Sequence[str]) -> Iterator[None]:
    """Runs a command; raises typer.Exit with the exit code of a foreseen error, after its text.  `arguments` are the user's own."""
    try:
        yield
    except CgbundleError as error:
        _tell(arguments, error.code, str(error), hint(error, arguments))
        raise typer.Exit(error.exit_code) from None
    except Stopped as stopped:
        _tell(arguments, "interrupted", str(stopped), "")
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        _tell(arguments, "interrupted", "interrupted", "")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno not in FULL and (error.filename is None or error.errno not in FORESEEN):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        _tell(arguments, "system", f"{where}{error.strerror}", "")
        raise typer.Exit(ENVIRONMENT) from None
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise  # nothing was typed: Typer shows the help
        command = error.ctx.command_path if error.ctx else "cgcompile"
        _tell(arguments, "usage", _unparsed(error), f"{command} --help")
        raise typer.Exit(ENVIRONMENT) from None


def _unparsed(error: Any) -> str:
    """What the parser says, as our own errors begin; of a mistyped option the one that is most like it."""
    text = str(error.format_message()).rstrip(".")
    if hasattr(error, "possibilities"):  # no such option
        near = difflib.get_close_matches(error.option_name, error.possibilities or (), 1)
        text = f"no such option: {error.option_name}" + (f" (did you mean {near[0]}?)" if near else "")
    return text[:1].lower() + text[1:]


JSON = "--json"


def _tell(arguments: Sequence[str], code: str, message: str, fix: str) -> None:
    complain(message, fix)
    if JSON in arguments:
        write_json({"error": as_object(code, message, fix)})


def as_object(code: str, message: str, fix: str) -> dict[str, str]:
    """An error for a script."""
    return {"code": code, "message": message, "where": place(message), "fix": fix}


COMMAND = "cgcompile build ..."
"""What a library's hint says where the user's own command belongs."""

KEPT = ("--sizes", "--target", "--fallback-op", "--train")
"""Options of a build that a check of the same model takes, too."""


def hint(error: CgbundleError, arguments: Sequence[str]) -> str:
    """What to do about `error`, as something to type where the library's own hint speaks of Python, or of the user's command."""
    spell = SPELLED.get(error.code)
    advice = spell(error, arguments) if spell else error.hint
    return advice.replace(COMMAND, again(arguments)) if arguments else advice


def again(arguments: Sequence[str], *more: str) -> str:
    """The user's own command with `more` behind it."""
    return shlex.join(["cgcompile", *arguments, *more])


def _exists(error: CgbundleError, arguments: Sequence[str]) -> str:
    return error.hint if "--force" in arguments else f"to replace it: {again(arguments, '--force')}"


def _more_keys(error: CgbundleError, arguments: Sequence[str]) -> str:
    limit = error.hint.rpartition(" ")[2]  # "... --max-keys 100"
    return f"give fewer sizes, or: {again(arguments, '--max-keys', limit)}"


def _easier(error: CgbundleError, arguments: Sequence[str]) -> str:
    if COMMAND in error.hint:
        return error.hint
    easier = f"{again(arguments, '--lower', 'eager')}, or find the operation: {_check(arguments)}"
    return error.hint if "eager" in arguments else easier


def _cut(error: CgbundleError, arguments: Sequence[str]) -> str:
    return f"the operation must run in a host region; to find it: {_check(arguments)}"


def _check(arguments: Sequence[str]) -> str:
    """`cgcompile check` for the model and the sizes of a build."""
    kept = [word for place, word in enumerate(arguments[1:], 1) if _is_kept(arguments, place)]
    return shlex.join(["cgcompile", "check", *kept])


def _is_kept(arguments: Sequence[str], place: int) -> bool:
    word, before = arguments[place], arguments[place - 1]
    if word.startswith("-"):
        return word.partition("=")[0] in KEPT
    return before in KEPT or not (before.startswith("-") and before not in FLAGS and "=" not in before)


FLAGS = ("--strict", "--train", "--force", "--quiet", "-q", "--verbose", "-v", "--json")
"""Options of a build that take no value."""

SPELLED: dict[str, Callable[[CgbundleError, Sequence[str]], str]] = {
    "output-exists": _exists,
    "too-many-keys": _more_keys,
    "lowering-failed": _easier,
    "not-capturable": _cut,
}
"""By the code of an error: its hint as a command."""
