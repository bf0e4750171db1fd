"""What a process holds, sampled while its threads stand still, and whether that grows."""

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
"""How much each may grow from the first quarter to the end.  The allocator and torch's caches settle within that."""

Sample = dict[str, int]


def sample(*, gpu: bool) -> Sample:
    """Bytes of memory and device memory, and numbers of the other things."""
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
    """Bytes of the GPU that are in use, as the driver counts them; torch gives back what it only keeps."""
    import torch

    from cgbundle.cuda.driver import check, cu

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = check("cuMemGetInfo", cu.cuMemGetInfo())
    return int(total) - int(free)


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """How much `values` grow over `times` (seconds, at least two) by the median of the slopes between any two: single peaks do not
    count."""
    pairs = [((t, v), (u, w)) for (t, v), (u, w) in combinations(zip(times, values, strict=True), 2) if u > t]
    return median((w - v) / (u - t) for (t, v), (u, w) in pairs) * (times[-1] - times[0])


def grown(times: Sequence[float], samples: Sequence[Sample]) -> list[str]:
    """A line for all that grew beyond its limit after the first quarter of the time; [] for fewer than four samples there."""
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
    """A sample in one line."""
    return ", ".join(
        f"{name} {value / MIB:.1f} MiB" if name in ("memory", "device") else f"{value} {name}" for name, value in counts.items()
    )
