"""Split-K: the number of parts that the inner axis of a matrix product is split into.  Pure Python.  A product with few rows has
too few blocks to fill a GPU.  A split product is a batched one with float32 partial sums: more blocks, with fewer steps each.
Inductor fuses the sum into the kernel that reads the product."""

from __future__ import annotations

from dataclasses import replace

from ...targets.architectures import Arch
from .cost_model import Candidate, Problem, Table, cost, fits, nearest

SPLIT_FACTORS = (2, 4, 8)

SHORTEST = 64
"""The minimum number of elements of the inner axis in a part."""

LAUNCH = 2.0
"""Microseconds of one more kernel, the sum over the parts, if it is not fused."""

READ = 2.0e12
"""Bytes per second at which partial sums are read from the cache.  This time overlaps little with a launch."""

WORTH = 0.9
"""A product is split if the split product takes less than this fraction of the unsplit product's time.  The margin covers errors of
estimates and measurements."""

CLOCK = 1.7e9
"""Cycles per second, which converts the cost model's cycles into time."""

TILES = tuple(
    Candidate(block_m=m, block_n=n, block_k=k, stages=stages, warps=4, group=8)
    for m, n, k, stages in (
        (16, 32, 128, 4), (32, 32, 128, 4), (32, 64, 64, 4), (64, 32, 128, 4), (64, 64, 64, 4), (128, 128, 64, 3),
    )
)  # fmt: skip
"""The configurations that the cost model tries for a product before its candidates are known."""


def split_factor(problem: Problem, arch: Arch, table: Table | None = None) -> int:
    """Returns the best number of parts for `problem` ("mm" or "addmm"); 1 means no split.  Uses the measurements of this problem or
    of a similar one, else the cost model."""
    factors = [factor for factor in SPLIT_FACTORS if problem.k % (16 * factor) == 0 and problem.k // factor >= SHORTEST]
    for neighbour in nearest(problem, table or {}):
        measured = {factor: _measured(neighbour, factor, table or {}) for factor in (1, *factors)}
        times = {factor: time + _reading(neighbour, factor) for factor, time in measured.items() if time is not None}
        if 1 in times and len(times) > 1:
            return _best(times)
    times = {factor: _estimated(problem, factor, arch) + _reading(problem, factor) for factor in (1, *factors)}
    return _best(times)


def split_problem(problem: Problem, factor: int) -> Problem:
    """The batched product of the parts."""
    return problem if factor == 1 else replace(problem, kind="bmm", batch=factor, k=problem.k // factor)


def _best(times: dict[int, float]) -> int:
    best = min(times, key=lambda factor: (times[factor], factor))
    return best if times[best] < WORTH * times[1] else 1


def _reading(problem: Problem, factor: int) -> float:
    """Microseconds for the sum over the parts."""
    return 0.0 if factor == 1 else LAUNCH + 1e6 * factor * problem.m * problem.n * 4 / READ


def _measured(problem: Problem, factor: int, table: Table) -> float | None:
    rows = table.get(split_problem(problem, factor))
    return min(time for _, time in rows) if rows else None


def _estimated(problem: Problem, factor: int, arch: Arch) -> float:
    parts_problem = split_problem(problem, factor)
    fitting = [tile for tile in TILES if fits(parts_problem, tile, arch)] or TILES[:1]
    return min(1e6 * cost(parts_problem, tile, arch) / CLOCK for tile in fitting)
