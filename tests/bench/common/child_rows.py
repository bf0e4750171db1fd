"""Shared by the parts of show.py: progress output, child processes with a time limit, and rows that hold an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.common import children

ROW_SECONDS = 300.0
STARTED = time.perf_counter()


def say(text: str) -> None:
    """Prints a line of progress on standard error, with the seconds since the program started."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Returns a child's environment: the repository's folders come first in PYTHONPATH, before those of this process."""
    paths = [str(children.ROOT / folder) for folder in ("bundles", ".", "cli")]
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return children.environment({"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **(extra or {})})


def run(
    script: str,
    *arguments: object,
    extra: dict[str, str] | None = None,
    seconds: float = ROW_SECONDS,
    python: Path | None = None,
) -> dict[str, Any]:
    """Runs a child and returns the JSON of its last line, or {"error": one line}. Raises no error if the child fails."""
    line = children.command(script, *arguments, python=python)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        line, env=environment(extra), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the child and its own children
            return {"error": f"{script}: not done after {seconds:.0f} s"}
    lines = stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        row: dict[str, Any] = json.loads(lines[-1])
        if not process.returncode or "error" in row:
            return row
    log = stderr.strip().splitlines()
    print("\n".join(f"    {text}" for text in log[-12:]), file=sys.stderr, flush=True)
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit {process.returncode}"
    return {"error": f"{script}: {how}: {(log or ['no message'])[-1][:300]}"}


def failed(row: dict[str, Any]) -> str:
    """Returns the row's error in one line, or ""."""
    return " ".join(str(row.get("error", "")).split())[:300]


def gpt_environment() -> dict[str, str]:
    """Returns the environment that makes examples/gpt.py the measured model."""
    return {"GPT_DTYPE": "bfloat16"}


def inductor_cache(cache: Path) -> dict[str, str]:
    """Returns an environment that keeps torch.compile's cache below `cache`."""
    folder = str(cache / "torch_compile")
    return {
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
