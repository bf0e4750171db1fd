"""What the parts of show.py share: progress, fresh processes with a time limit, rows that hold an error instead of numbers."""

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
    """A line of progress on standard error, with the seconds since the program began."""
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """A child's environment: the tree first, then whatever PYTHONPATH named already (a carried package, say)."""
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
    """What the child prints as JSON on its last line, or {"error": one line}; never raises for what the child does."""
    line = children.command(script, *arguments, python=python)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        line, env=environment(extra), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the child and whatever it started
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
    """The row's error on one line, or ""."""
    return " ".join(str(row.get("error", "")).split())[:300]


def gpt_environment() -> dict[str, str]:
    """The environment in which examples/gpt.py is the model that is measured."""
    return {"GPT_DTYPE": "bfloat16"}


def inductor_cache(cache: Path) -> dict[str, str]:
    """Environment of torch.compile's own cache, on disk below `cache`."""
    folder = str(cache / "torch_compile")
    return {
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
