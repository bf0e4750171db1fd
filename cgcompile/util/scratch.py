"""A folder for the time of a build."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 3.0
"""Seconds that the folder's removal is tried again."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, removed at the end.  Compilers' worker processes may outlive the process that started them by a moment and
    still write there.  So removing is tried again; what is left after PATIENCE stays, since the build itself is done."""
    folder = Path(tempfile.mkdtemp(prefix="cgcompile-"))
    try:
        yield folder
    finally:
        end = time.monotonic() + PATIENCE
        shutil.rmtree(folder, ignore_errors=True)
        while folder.exists() and time.monotonic() < end:
            time.sleep(0.05)
            shutil.rmtree(folder, ignore_errors=True)
