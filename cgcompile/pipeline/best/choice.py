"""Which lowering an int_key gets, given what their graphs took.  Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from cgbundle.format.schema import IntKey

LOWERINGS = ("eager", "inductor", "cross-compile", "max-autotune")
"""From the simplest to the most involved: PyTorch's own libraries; Inductor; everything in Triton, as when cross-compiling;
Inductor with benchmarked products."""

SEARCHED = ("inductor", "eager", "cross-compile", "max-autotune")
"""The order in which they are made: what is mostly good and soon there comes first, should the time be over."""

ALIKE = 0.01
"""Of two lowerings whose times differ by less than this share of the faster, the simpler one is taken: medians of repeated launches
vary by as much from build to build."""

Times = Mapping[str, tuple[float, ...]]
"""By lowering, the microseconds of each graph of an int_key."""


def choose(times: Mapping[IntKey, Times], conflicts: Collection[frozenset[str]] = ()) -> dict[IntKey, str]:
    """The lowering of every key, the graphs of a key all of one: the simplest whose sum is within ALIKE of the fastest.

    `times`: of all keys, each of the same lowerings, at least one.  `conflicts`: pairs that cannot be in one bundle.  Where both of
    a pair were chosen, the one is left out of all keys without which they take the least time in all.
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
    return min([name for name, taken in sums.items() if taken <= limit], key=LOWERINGS.index)


def _total(keys: Iterable[Times], without: Collection[str]) -> float:
    """Microseconds of the fastest of every key in all; infinite where one has none."""
    return sum([min([sum(timings) for name, timings in times.items() if name not in without], default=math.inf) for times in keys])
