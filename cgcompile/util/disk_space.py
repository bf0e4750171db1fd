"""Bytes for people, and a full disk, told by the folder that the user chose: the output's, the temporary one, the cache."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, ModelError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system says of a full disk, and of one whose owner may have no more of it."""

SAID = re.compile(f"{os.strerror(errno.ENOSPC)}|{os.strerror(errno.EDQUOT)}")
"""The same in the messages of compilers."""

LITTLE = 64 << 10
"""Free bytes below which a disk is full: compilers remove what they could not write to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What a folder is to a build, and how the user gives another one."""

    what: str
    other: str


OUTPUT = Chosen(what="the bundle", other="give another place with -o")
SCRATCH = Chosen(what="temporary files of the build", other="set TMPDIR to another folder")
CACHE = Chosen(what="compiled kernels for the next build", other="set CGCOMPILE_CACHE to another folder")


def size(number: int) -> str:
    """Bytes for people: `0 B`, `80.5 KiB`, `1.2 GiB`."""
    if number < 1024:
        return f"{number} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(1, len(units)) if number / 1024**power < 1023.95), len(units))
    return f"{number / 1024**power:.1f} {units[power - 1]}"


def disk_full(folder: Path, chosen: Chosen) -> BuildError:
    """The error for a folder on a full disk."""
    free = _free(folder)
    left = f"{size(free)} free" + (", which was too little, or a quota is used up" if free > LITTLE else "")
    text = f"{folder}: no space left for {chosen.what}: {left}"
    return BuildError("disk-full", text, f"free some space there, or {chosen.other}")


@contextmanager
def space_told(folder: Path, chosen: Chosen) -> Iterator[None]:
    """Raises disk-full for what fails in the block since the disk of `folder` is full, which is a build's own in one of the user's.
    Errors of writing need not name a file, a copy's names both, and what torch and compilers raise need not mention the disk.  So
    the disk itself is looked at."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, BuildError) and error.code == "disk-full") and _concerns(error, folder):
            raise disk_full(folder.absolute().parent, chosen) from error
        raise


def _concerns(error: Exception, folder: Path) -> bool:
    if isinstance(error, OSError):
        if error.errno not in FULL:
            return False
        written = error.filename2 or error.filename  # a copy's error names the source first
        if isinstance(written, str) and Path(written).is_absolute():
            return Path(written).is_relative_to(folder.absolute())
    elif SAID.search(_texts(error)):
        return True
    return not isinstance(error, ModelError) and _free(folder) < LITTLE


def _texts(error: BaseException) -> str:
    """The messages of an error and of its causes."""
    return f"{error}\n{_texts(error.__cause__)}" if error.__cause__ else str(error)


def _free(folder: Path) -> int:
    """The bytes that this user can still write on a folder's disk; 0 where files are used up."""
    while not folder.exists():
        folder = folder.parent
    about = os.statvfs(folder)
    if about.f_files and not about.f_ffree:
        return 0
    return about.f_bavail * about.f_frsize
