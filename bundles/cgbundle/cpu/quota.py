"""The processor time that a container may use: what `docker --cpus` and a pod's `limits.cpu` set, a quota of its control group.

OpenMP counts the processors that a process may run on, and knows no quota: it would start a thread for each of the host's.  They
use the time up while they wait for one another, and are stopped together.  Source: CFS bandwidth control in the documentation of
Linux, cpu.max of cgroup v2, cpu.cfs_quota_us of v1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

NUMBER = "OMP_NUM_THREADS"
"""Where OpenMP's number is given, that is what a program uses."""


def threads_of_quota(root: str = "/") -> int | None:
    """How many threads can run all the time, one at least, where that is fewer than the processors that the process may run on.

    None where there is no such quota, or the environment says a number.
    """
    if NUMBER in os.environ:
        return None
    shares = [share for share in (_share(text) for text in _quotas(root)) if share is not None]
    number = max(1, int(min(shares))) if shares else None
    return number if number is not None and number < len(os.sched_getaffinity(0)) else None


def _quotas(root: str) -> Iterator[str]:
    """Quota and period, in microseconds, of the process's groups and of those above; inside a container its own is the top."""
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", "cpu" if kinds else "")
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            folder = os.path.join(top, *parts[:depth])
            if kinds:
                yield f"{_read(os.path.join(folder, 'cpu.cfs_quota_us'))} {_read(os.path.join(folder, 'cpu.cfs_period_us'))}"
            else:
                yield _read(os.path.join(folder, "cpu.max"))


def _share(text: str) -> float | None:
    """Processors' worth of time; None for "max", for -1, and for what is not there."""
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() and int(period) else None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
