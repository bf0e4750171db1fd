"""Starts processes and reads their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.common import serving

BENCH = Path(__file__).parents[1]
ROOT = BENCH.parents[1]


class ChildFailed(Exception):
    """A child process failed; the message holds its standard error."""


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Returns a child's environment, with the packages of this repository first on its path and the time of its start."""
    inherited = [search_path for search_path in (os.environ.get("PYTHONPATH"),) if search_path]
    path = os.pathsep.join([str(ROOT / "bundles"), str(ROOT), str(ROOT / "cli"), *inherited])
    # needed if this checkout is not installed
    return os.environ | {"PYTHONPATH": path} | (extra or {}) | {serving.SPAWNED: repr(serving.now())}


def command(script: str, *arguments: object, python: Path | None = None) -> list[str]:
    """Returns the command line of a child; `script` is its path in tests/bench, `python` an interpreter other than this one."""
    return [str(python or sys.executable), str(BENCH / script), *map(str, arguments)]


def run(script: str, *arguments: object, extra: dict[str, str] | None = None) -> Any:
    """Runs a child and returns the JSON of its last line. Raises ChildFailed."""
    line = command(script, *arguments)
    done = subprocess.run(line, env=environment(extra), capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise ChildFailed(f"{script} {arguments[0]}: exit {done.returncode}\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])
