"""A folder for the time of a build."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import BuildError
from .disk_space import FULL, SCRATCH, disk_full, space_told

PATIENCE = 3.0
"""Seconds that the folder's removal is tried again."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, this user's alone (mode 0700), removed at the end.  Compilers' worker processes may outlive the process that
    started them by a moment and still write there.  So removing is tried again; what is left after PATIENCE stays, since the build
    itself is done.  Raises scratch-unwritable where there can be none, and disk-full for what fails since its disk is full."""
    folder = _made()
    try:
        with space_told(folder, SCRATCH):
            yield folder
    finally:
        end = time.monotonic() + PATIENCE
        shutil.rmtree(folder, ignore_errors=True)
        while folder.exists() and time.monotonic() < end:
            time.sleep(0.05)
            shutil.rmtree(folder, ignore_errors=True)


def _made() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="cgcompile-"))
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(Path(tempfile.gettempdir()), SCRATCH) from error
        where = f"{error.filename}: " if error.filename else ""
        raise BuildError("scratch-unwritable", f"{where}{error.strerror}") from error
