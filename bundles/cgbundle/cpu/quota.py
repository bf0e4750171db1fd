"""What a container may use of the machine: processor time (`docker --cpus`, a pod's `limits.cpu`) and memory, by its control group.

OpenMP counts the processors that a process may run on, and knows no quota: it would start a thread for each of the host's.  They
use the time up while they wait for one another, and are stopped together.  Source: CFS bandwidth control in the documentation of
Linux, cpu.max and memory.max of cgroup v2, cpu.cfs_quota_us and memory.limit_in_bytes of v1.
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


def memory_of_quota(root: str = "/") -> int:
    """Bytes that the process may have: those of the machine, or fewer where a control group says so."""
    limits = [
        _read(os.path.join(folder, "memory.limit_in_bytes" if old else "memory.max")) for folder, old in _groups(root, "memory")
    ]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *[int(limit) for limit in limits if limit.isdigit()]])


def _quotas(root: str) -> Iterator[str]:
    """Quota and period, in microseconds."""
    for folder, old in _groups(root, "cpu"):
        if old:
            yield f"{_read(os.path.join(folder, 'cpu.cfs_quota_us'))} {_read(os.path.join(folder, 'cpu.cfs_period_us'))}"
        else:
            yield _read(os.path.join(folder, "cpu.max"))


def _groups(root: str, kind: str) -> Iterator[tuple[str, bool]]:
    """The folders of the process's control groups of a kind and of those above, and whether they are version 1's.  Inside a
    container its own is the top."""
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", kind if kinds else "")
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield os.path.join(top, *parts[:depth]), bool(kinds)


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
