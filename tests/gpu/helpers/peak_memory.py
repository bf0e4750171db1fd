"""Measures the host memory of a command and its children: `python -m tests.gpu.helpers.peak_memory COMMAND...` prints the peak in
its last line."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

INTERVAL = 0.1
"""Seconds between two samples."""


def run(command: Sequence[str]) -> tuple[int, float, int]:
    """Returns the exit status, the seconds, and the peak memory of the process tree in bytes.

    Mapped files do not count. A process counts with its proportional share of anonymous and shared pages, if the kernel reports it.
    Otherwise its anonymous pages count, or else its resident memory.
    """
    begin, most = time.monotonic(), 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        most = max(most, sum(map(_used_bytes, _tree(process.pid))))
        time.sleep(INTERVAL)
    return process.returncode, time.monotonic() - begin, most


def _tree(root: int) -> list[int]:
    """Returns a process and all its descendants."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (match := re.search(r"\nPPid:\s+(\d+)", _read(folder / "status"))):
            parents[int(folder.name)] = int(match[1])
    tree = [root]
    for process in tree:
        tree += [child for child, parent in parents.items() if parent == process]
    return tree


def _used_bytes(process: int) -> int:
    shares = re.findall(r"\nPss_(?:Anon|Shmem):\s+(\d+) kB", _read(Path(f"/proc/{process}/smaps_rollup")))
    if shares:
        return sum(map(int, shares)) * 1024
    status = _read(Path(f"/proc/{process}/status"))
    match = re.search(r"\nRssAnon:\s+(\d+) kB", status) or re.search(r"\nVmRSS:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""


if __name__ == "__main__":
    status, seconds, most = run(sys.argv[1:])
    print(f"status {status}, {seconds:.1f} s, at most {most / 1e9:.2f} GB of the host's memory")
    sys.exit(status)
