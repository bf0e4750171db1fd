"""The one place where exceptions become text: one line that says what and where, a `hint:` line, and the exit code.

Commands do not catch.  What is not listed here is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

from cgbundle.errors import CgbundleError
from cgcompile.errors import OutputExists

from .output import complain

INTERRUPTED = 130
ENVIRONMENT = 2

FORESEEN = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EIO,
})  # fmt: skip
"""What the operating system may say about a path that the user named."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The disk is full: such an error need not name a path."""


class Usage(CgbundleError):
    """Options or a file of the user's that do not fit the command."""

    exit_code = ENVIRONMENT


@contextmanager
def as_text(arguments: Sequence[str]) -> Iterator[None]:
    """Runs a command; raises typer.Exit with the exit code of a foreseen error, after its text.  `arguments` are the user's own."""
    try:
        yield
    except CgbundleError as error:
        complain(str(error), hint(error, arguments))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        complain("interrupted", "")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno not in FULL and (error.filename is None or error.errno not in FORESEEN):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        complain(f"{where}{error.strerror}", "")
        raise typer.Exit(ENVIRONMENT) from None


def hint(error: CgbundleError, arguments: Sequence[str]) -> str:
    """What to do about `error`, as something to type where the library's own hint speaks of Python."""
    spell = _SPELLED.get(type(error))
    return spell(error, arguments) if spell else error.hint


def again(arguments: Sequence[str], *more: str) -> str:
    """The user's own command with `more` behind it."""
    return shlex.join(["cgcompile", *arguments, *more])


def _exists(error: CgbundleError, arguments: Sequence[str]) -> str:
    return error.hint if "--force" in arguments else f"to replace it: {again(arguments, '--force')}"


_SPELLED: dict[type, Callable[[CgbundleError, Sequence[str]], str]] = {OutputExists: _exists}
