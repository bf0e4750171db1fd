"""Formats sizes, and reports a full disk.  The error names the folder that the user chose: output, temporary folder or cache."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, ModelError, causes

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk and of an exhausted quota."""

FULL_MESSAGE = re.compile(f"{os.strerror(errno.ENOSPC)}|{os.strerror(errno.EDQUOT)}")
"""The same errors in the messages of compilers."""

LITTLE = 64 << 10
"""A disk with fewer free bytes counts as full.  The limit is not 0, because a compiler that fails removes its incomplete file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The purpose of a folder, and how the user can choose another one."""

    what: str
    other: str


OUTPUT = Chosen(what="the bundle", other="give another place with -o")
SCRATCH = Chosen(what="temporary files of the build", other="set TMPDIR to another folder")
CACHE = Chosen(what="compiled kernels for the next build", other="set CGCOMPILE_CACHE to another folder")


def size(number: int) -> str:
    """Formats a number of bytes: `0 B`, `80.5 KiB`, `1.2 GiB`."""
    if number < 1024:
        return f"{number} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(1, len(units)) if number / 1024**power < 1023.95), len(units))
    return f"{number / 1024**power:.1f} {units[power - 1]}"


def disk_full(folder: Path, chosen: Chosen) -> BuildError:
    """Returns the error for a folder on a full disk."""
    free = _free(folder)
    free_text = f"{size(free)} free" + (", which was too little, or a quota is used up" if free > LITTLE else "")
    text = f"{folder}: no space left for {chosen.what}: {free_text}"
    return BuildError("disk-full", text, f"free some space there, or {chosen.other}")


@contextmanager
def space_told(folder: Path, chosen: Chosen) -> Iterator[None]:
    """Raises disk-full if the block fails because the disk of `folder` is full.  The build created `folder` in a folder that the
    user chose.  Checks the free space if the error does not show the cause: errors of torch and compilers may not mention the
    disk."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, BuildError) and error.code == "disk-full") and _caused_by_full_disk(error, folder):
            raise disk_full(folder.absolute().parent, chosen) from error
        raise


def _caused_by_full_disk(error: Exception, folder: Path) -> bool:
    if isinstance(error, OSError):
        if error.errno not in FULL:
            return False
        written = error.filename2 or error.filename  # if a copy failed, `filename` is the source
        if isinstance(written, str) and Path(written).is_absolute():
            return Path(written).is_relative_to(folder.absolute())
    elif any(FULL_MESSAGE.search(str(cause)) for cause in causes(error)):
        return True
    return not isinstance(error, ModelError) and _free(folder) < LITTLE


def _free(folder: Path) -> int:
    """Returns the bytes that this user can still write on a folder's disk; 0 if no inode is free."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    if status.f_files and not status.f_ffree:
        return 0
    return status.f_bavail * status.f_frsize
