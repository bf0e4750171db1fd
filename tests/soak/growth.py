"""Samples the resources of a process while its threads pause, and checks whether they grow."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20

LIMITS = {"memory": 12 * MIB, "descriptors": 3, "mappings": 40, "threads": 3, "device": 8 * MIB}
"""Allowed growth from the first quarter to the end. The allocator and torch's caches settle within that."""

Sample = dict[str, int]


def sample(*, gpu: bool) -> Sample:
    """Returns bytes of memory and device memory, and the numbers of other resources."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = Path("/proc/self")
    counts = {
        "memory": int((process / "statm").read_text().split()[1]) * PAGE,
        "descriptors": len(os.listdir(process / "fd")),
        "mappings": len((process / "maps").read_text().splitlines()),
        "threads": len(os.listdir(process / "task")),
    }
    if gpu:
        counts["device"] = _device_bytes()
    return counts


def _device_bytes() -> int:
    """Returns the used bytes of GPU memory as the driver counts them, after torch has freed its cache."""
    import torch

    from cgbundle.cuda.driver import check, cu

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = check("cuMemGetInfo", cu.cuMemGetInfo())
    return int(total) - int(free)


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """Returns the growth of `values` over `times` (seconds, at least two), by the median slope between any two values, which single
    peaks do not change."""
    pairs = [((t, v), (u, w)) for (t, v), (u, w) in combinations(zip(times, values, strict=True), 2) if u > t]
    return median((w - v) / (u - t) for (t, v), (u, w) in pairs) * (times[-1] - times[0])


def grown(times: Sequence[float], samples: Sequence[Sample]) -> list[str]:
    """Returns a line for every resource that grew beyond its limit after the first quarter; [] for fewer than four samples."""
    begin = times[0] + (times[-1] - times[0]) / 4 if times else 0.0
    chosen = [place for place, time in enumerate(times) if time >= begin]
    if len(chosen) < 4:
        return []
    lines = []
    for name, limit in LIMITS.items():
        if name in samples[0]:
            more = growth([times[place] for place in chosen], [samples[place][name] for place in chosen])
            if more > limit:
                first, last = samples[chosen[0]][name], samples[chosen[-1]][name]
                lines.append(f"{name} grew by {more:,.0f} (from {first:,} to {last:,}), at most {limit:,} is expected")
    return lines


def text(counts: Sample) -> str:
    """Returns a sample as one line."""
    return ", ".join(
        f"{name} {value / MIB:.1f} MiB" if name in ("memory", "device") else f"{value} {name}" for name, value in counts.items()
    )
