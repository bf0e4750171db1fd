"""Where `inspect --html` writes: a new file, or over an earlier report."""

from __future__ import annotations

import os
import tempfile

from ..errors import UsageError
from .page import OPENING


def check_place(file: str, bundle: str) -> None:
    """Raises UsageError where the page cannot go: a directory, a missing folder, the bundle itself, or a file that is no report."""
    folder = os.path.dirname(file) or "."
    if not file:
        raise UsageError("--html: expected the name of a file", "name one, or - for stdout")
    if os.path.isdir(file):
        raise UsageError(f"{file}: a directory, not a file", f"to write into it: --html {os.path.join(file, 'report.html')}")
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such folder", f"make it first, or name a file elsewhere than {file}")
    root = os.path.realpath(bundle)
    if os.path.commonpath([root, os.path.realpath(folder)]) == root:
        raise UsageError(f"{file}: inside the bundle, which must not hold other files", "name a file elsewhere")
    if os.path.isfile(file):
        with open(file, "rb") as known:
            begin = known.read(len(OPENING))
        if begin and begin != OPENING.encode():
            raise UsageError(f"{file}: exists, and is not a report of cgcompile", "name another file, or remove that one first")


def write(file: str, page: str) -> int:
    """Writes the page beside its place and renames it there: a reader never sees half of it.  Returns its bytes."""
    data = page.encode()
    if os.path.lexists(file) and not os.path.isfile(file):  # a pipe or a device: nothing to replace
        with open(file, "wb") as stream:
            stream.write(data)
        return len(data)
    place = os.path.realpath(file)
    try:
        handle, beside = tempfile.mkstemp(dir=os.path.dirname(place), prefix=".inspect-", suffix=".html")
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from None  # the name that the user knows
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(data)
        os.chmod(beside, _mode(place))
        os.replace(beside, place)
    except BaseException:
        os.unlink(beside)
        raise
    return len(data)


def _mode(place: str) -> int:
    """The permissions of the file that is replaced, or those that a new file gets."""
    if os.path.exists(place):
        return os.stat(place).st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
