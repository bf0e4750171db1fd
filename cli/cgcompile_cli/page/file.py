"""Writes the page of `inspect --html` to a new file, or over an earlier report."""

from __future__ import annotations

import os
import tempfile

from ..errors import UsageError
from .page import OPENING


def check_place(file: str, bundle: str) -> None:
    """Raises UsageError if `file` is empty, is a directory, is in a folder that does not exist, lies in the bundle, or exists and
    is not a page of `inspect`."""
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
        with open(file, "rb") as report:
            begin = report.read(len(OPENING))
        if begin and begin != OPENING.encode():
            raise UsageError(f"{file}: exists, and is not a report of cgcompile", "name another file, or remove that one first")


def write(file: str, page: str) -> int:
    """Writes the page to a temporary file and renames it, so that the write is atomic.  Returns the number of bytes."""
    data = page.encode()
    if os.path.lexists(file) and not os.path.isfile(file):  # a pipe or a device
        with open(file, "wb") as stream:
            stream.write(data)
        return len(data)
    place = os.path.realpath(file)
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(place), prefix=".inspect-", suffix=".html")
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from None  # with the file name from the user
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(data)
        os.chmod(temporary, _mode(place))
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise
    return len(data)


def _mode(place: str) -> int:
    """Returns the permissions of the replaced file, or those of a new file."""
    if os.path.exists(place):
        return os.stat(place).st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
