"""Starting and measuring fresh processes."""

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
    """A measured process ended with an error; the message holds what it said."""


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """What a child inherits, with the packages of this tree first on its path and the moment of its start."""
    inherited = [search_path for search_path in (os.environ.get("PYTHONPATH"),) if search_path]
    path = os.pathsep.join([str(ROOT / "bundles"), str(ROOT), str(ROOT / "cli"), *inherited])
    # an editable install may put the same folders there already; a tree without one works too
    return os.environ | {"PYTHONPATH": path} | (extra or {}) | {serving.SPAWNED: repr(serving.now())}


def command(script: str, *arguments: object, python: Path | None = None) -> list[str]:
    """The command line of a child, `script` being its path in tests/bench.  `python`: an interpreter other than this one."""
    return [str(python or sys.executable), str(BENCH / script), *map(str, arguments)]


def run(script: str, *arguments: object, extra: dict[str, str] | None = None) -> Any:
    """What the child prints as JSON on its last line.  Raises ChildFailed."""
    line = command(script, *arguments)
    done = subprocess.run(line, env=environment(extra), capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise ChildFailed(f"{script} {arguments[0]}: exit {done.returncode}\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])
