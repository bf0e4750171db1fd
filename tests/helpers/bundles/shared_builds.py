"""Builds that many test files use. Each runs once per test run, even if the tests run in several processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.helpers.cxx import SHARED


def shared_build(name: str, build: Callable[[Path], object]) -> Path:
    """Returns the folder `name`. The first caller fills it with `build(folder)`; others wait. Copy a file before you change it."""
    folder = Path(os.environ[SHARED]) / name
    finished = folder.with_suffix(".whole")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            finished.touch()
    return folder
