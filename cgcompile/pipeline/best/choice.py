"""Chooses a lowering for every int_key from measured times."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from cgbundle.format.schema import IntKey

LOWERINGS = ("eager", "inductor", "cross-compile", "max-autotune")
"""From the simplest to the most complex: PyTorch's libraries; Inductor; Triton kernels only, as when cross-compiling; Inductor with
max_autotune."""

SEARCHED = ("inductor", "eager", "cross-compile", "max-autotune")
"""The order in which they are recorded: first those that are recorded fast and are usually good, because time may run out."""

ALIKE = 0.01
"""Relative difference below which two times count as equal, and the simpler lowering is chosen.  Medians of repeated launches vary
that much from build to build."""

Times = Mapping[str, tuple[float, ...]]
"""Lowering -> times of the graphs of one int_key, in microseconds."""


def choose(times: Mapping[IntKey, Times], conflicts: Collection[frozenset[str]] = ()) -> dict[IntKey, str]:
    """Returns the lowering of every key: the simplest one whose total time is within ALIKE of the fastest.  All graphs of a key
    have the same lowering.

    `times`: the same lowerings for every key, at least one.  `conflicts`: pairs that cannot be in one bundle.  If both of a pair
    are chosen, one is left out, so that the total time of all keys is smallest.
    """
    left_out: set[str] = set()
    while True:
        chosen = {key: _fastest(time, left_out) for key, time in times.items()}
        both = [pair for pair in conflicts if pair <= set(chosen.values())]
        if not both:
            return chosen
        pair = sorted(min(both, key=sorted), key=LOWERINGS.index, reverse=True)
        left_out.add(min(pair, key=lambda name: _total(times.values(), left_out | {name})))


def _fastest(times: Times, without: Collection[str]) -> str:
    sums = {name: sum(time) for name, time in times.items() if name not in without}
    limit = min(sums.values()) * (1 + ALIKE)
    return min([name for name, total in sums.items() if total <= limit], key=LOWERINGS.index)


def _total(rows: Iterable[Times], without: Collection[str]) -> float:
    """Returns the sum over all keys of the fastest time, in microseconds; infinite if a key has no lowering left."""
    return sum([min([sum(timings) for name, timings in times.items() if name not in without], default=math.inf) for times in rows])
