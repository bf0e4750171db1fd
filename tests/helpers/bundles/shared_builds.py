"""What is built once per run and used by many files of tests, which may run in several processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.helpers.cxx import SHARED


def shared_build(name: str, build: Callable[[Path], object]) -> Path:
    """The folder `name`, which the first to ask fills with `build(folder)` while others wait.  Copy what you change."""
    folder = Path(os.environ[SHARED]) / name
    whole = folder.with_suffix(".whole")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            whole.touch()
    return folder
