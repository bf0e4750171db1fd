"""Into how many split_factor the inner axis of a matrix product is cut.  Pure Python.

A product of few rows has too few blocks to fill a GPU, and each of them walks the whole inner axis.  Cut into split_factor, which are a
batched product with partial sums in float32, it has as many times the blocks, each with a fraction of the steps; the sum over the
split_factor is fused into whatever reads the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...targets.architectures import Arch
from .cost_model import Candidate, Problem, Table, cost, fits, nearest

SPLIT_FACTORS = (2, 4, 8)

SHORTEST = 64
"""Elements of the inner axis that a piece has at least."""

LAUNCH = 2.0
"""Microseconds of one more kernel in a graph, which the sum over the split_factor is where nothing else reads the product."""

READ = 2.0e12
"""Bytes per second at which partial sums, fresh in the cache, are read again; a launch overlaps little of it."""

WORTH = 0.9
"""A cut is made when it takes less than this part of the whole product's time: estimates and measurements err."""

CLOCK = 1.7e9
"""Cycles per second, to compare the model of cost with bytes."""

TILES = tuple(
    Candidate(block_m=m, block_n=n, block_k=k, stages=stages, warps=4, group=8)
    for m, n, k, stages in (
        (16, 32, 128, 4), (32, 32, 128, 4), (32, 64, 64, 4), (64, 32, 128, 4), (64, 64, 64, 4), (128, 128, 64, 3),
    )
)  # fmt: skip
"""What the model of cost tries for a product whose candidates are not known yet."""


def split_factor(problem: Problem, arch: Arch, table: Table | None = None) -> int:
    """1, or the number of split_factor that `problem` ("mm" or "addmm") is best cut into: by the measurements of this problem or of one
    close to it, else by the model of cost."""
    cuts = [cut for cut in SPLIT_FACTORS if problem.k % (16 * cut) == 0 and problem.k // cut >= SHORTEST]
    for known in nearest(problem, table or {}):
        measured = {cut: _measured(known, cut, table or {}) for cut in (1, *cuts)}
        times = {cut: time + _reading(known, cut) for cut, time in measured.items() if time is not None}
        if 1 in times and len(times) > 1:
            return _best(times)
    times = {cut: _estimated(problem, cut, arch) + _reading(problem, cut) for cut in (1, *cuts)}
    return _best(times)


def split_problem(problem: Problem, cut: int) -> Problem:
    """The batched product that the split_factor are."""
    return problem if cut == 1 else replace(problem, kind="bmm", batch=cut, k=problem.k // cut)


def _best(times: dict[int, float]) -> int:
    best = min(times, key=lambda cut: (times[cut], cut))
    return best if times[best] < WORTH * times[1] else 1


def _reading(problem: Problem, cut: int) -> float:
    """Microseconds that the sum over the split_factor takes."""
    return 0.0 if cut == 1 else LAUNCH + 1e6 * cut * problem.m * problem.n * 4 / READ


def _measured(problem: Problem, cut: int, table: Table) -> float | None:
    rows = table.get(split_problem(problem, cut))
    return min(time for _, time in rows) if rows else None


def _estimated(problem: Problem, cut: int, arch: Arch) -> float:
    wanted = split_problem(problem, cut)
    return min(1e6 * cost(wanted, tile, arch) / CLOCK for tile in _fitting(wanted, arch))


def _fitting(problem: Problem, arch: Arch) -> Sequence[Candidate]:
    return [tile for tile in TILES if fits(problem, tile, arch)] or TILES[:1]
