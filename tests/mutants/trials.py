"""Runs tests over a mutated copy of the tree, each time in a child of a process that has imported the test tools."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "bundles", "cgcompile", "cli", "examples", "tests", ".ci", "pyproject.toml", "README.md", "LICENSE", "Makefile",
)  # fmt: skip
"""Files and folders that the tests of tests/pure read."""

OURS = ("tests", "cgbundle", "cgcompile", "cgcompile_cli")

MEMORY = 4 << 30
"""Memory limit of a mutant in bytes: it ends a mutant that appends forever."""

PASSED, FAILED = 0, 1


def copy_tree(folder: Path) -> Path:
    """Copies the tree to `folder`, for one child at a time."""
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name)
    return folder


@dataclass(kw_only=True, slots=True)
class Trial:
    """Tests that run in a child process over the tree in `folder`, for at most `limit` seconds after `started`."""

    folder: Path
    process: int
    limit: float
    started: float = field(default_factory=time.monotonic)

    def poll(self) -> int | None:
        """Returns pytest's exit status, or that of a killed process; None while it runs."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        if not done and time.monotonic() - self.started < self.limit:
            return None
        self.end()
        if not done:
            _, status = os.waitpid(self.process, 0)
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """Kills the child and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")


def start(folder: Path, tests: Sequence[str], limit: float, *, keep_bytecode: bool = False) -> Trial:
    """Starts `tests`, paths below `folder`, which stop at the first failure. `keep_bytecode` writes .pyc files."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return Trial(folder=folder, process=process, limit=limit)
    status = 70
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = _run(folder, tests, keep_bytecode=keep_bytecode)
    finally:
        os._exit(status)


def _run(folder: Path, tests: Sequence[str], *, keep_bytecode: bool) -> int:
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    paths = [str(folder / name) for name in (".", "cli", "bundles")]
    sys.path[:] = [*paths, *(path for path in sys.path if path and ROOT not in (Path(path), *Path(path).parents[:2]))]
    sys.path_importer_cache.clear()
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.pop("CXX", None)
    sys.dont_write_bytecode = not keep_bytecode
    if not keep_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.chdir(folder)
    # hypothesis: the same examples in every run, no database, no shrinking
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=phases, deadline=None)
    hypothesis.settings.load_profile("mutants")
    return int(pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder), *tests]))
