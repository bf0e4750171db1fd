"""What all tests share: a folder for what is built once per run, and a compiler that keeps its headers there.

The folder's path and the compiler are variables of the environment: the workers of pytest-xdist and processes that tests start have
them too.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from tests.helpers import cxx


def pytest_configure(config: pytest.Config) -> None:
    """Before any worker starts.  A compiler that the user names stays."""
    if hasattr(config, "workerinput"):
        return
    os.environ[cxx.SHARED] = tempfile.mkdtemp(prefix="cgcompile-tests-")
    if "CXX" not in os.environ and shutil.which(cxx.COMPILER):
        os.environ["CXX"] = cxx.__file__


def pytest_unconfigure(config: pytest.Config) -> None:
    """When all workers have ended."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[cxx.SHARED], ignore_errors=True)
