"""Measures which pages several serving processes of one bundle share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench.common import children

WEIGHTS = "weights.safetensors"
FIELDS = ("Rss", "Pss", "Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty")

Pages = dict[str, int]
"""KiB of each of FIELDS."""


def measure(bundle: Path, inputs: list[str], count: int) -> list[dict[str, Pages]]:
    """Returns, for each of `count` open processes that have served a call, its pages of the weights and of the whole process."""
    with ExitStack() as stack:
        running = [stack.enter_context(server(bundle, inputs)) for _ in range(count)]
        for process in running:
            ready(process)
        return [pages(process.pid) for process in running]


@contextmanager
def server(bundle: Path, inputs: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs a serving process until the end of the block."""
    line = children.command("cpu/serve_until.py", bundle, *inputs)
    pipe = subprocess.PIPE
    with subprocess.Popen(line, env=children.environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def ready(process: subprocess.Popen[str]) -> None:
    """Waits for the first answer of the process. Raises ChildFailed if it ends without one."""
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline().strip() != "ready":
        raise children.ChildFailed(f"serve_until.py: {process.stderr.read().strip()}")


def pages(pid: int) -> dict[str, Pages]:
    """Returns sums over the process's mappings: those of the weights file, and all."""
    totals = {"weights": dict.fromkeys(FIELDS, 0), "process": dict.fromkeys(FIELDS, 0)}
    of_weights = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if " " in name:  # the first line of a mapping: addresses, permissions, ..., file
            of_weights = line.endswith(f"/{WEIGHTS}")
        elif name in FIELDS:
            size = int(rest.split()[0])
            totals["process"][name] += size
            totals["weights"][name] += size * of_weights
    return totals
