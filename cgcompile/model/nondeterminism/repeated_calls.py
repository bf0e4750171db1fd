"""What calls with the same inputs give: whether numbers drawn by Python or NumPy, or the time, decide about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...util.tolerance import compare
from ..devices.index_guard import FAILURES, guarded_indices
from ..flat_module import FlatModule, run_eager
from ..side_effects import Obstacle
from ..source import SEED
from .clock_reads import STEPS, SYSTEM, Read, outside_reads, put_forward
from .generators import Generator, first_draw, put_back, states

Results = tuple[torch.Tensor, ...]
"""Outputs, and what the buffers hold after the call."""

ORDINARY = 4
"""Calls with other numbers, beside those with numbers at either end of their range."""

SPREADS = 4.0
"""On a GPU calls differ by rounding: what differs by more than so much of that does not."""


def results(flat: FlatModule, tensors: Sequence[torch.Tensor]) -> Results:
    """Of a call with torch's random numbers the same every time."""
    with torch.random.fork_rng(devices=sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})):
        torch.manual_seed(SEED)
        ran = run_eager(flat, tensors)
    return (*ran.outputs, *ran.state.values())


def apart(one: Results, other: Results) -> float:
    """The largest error of `other` beside `one`."""
    return max([compare(want, got).error for want, got in zip(one, other, strict=True)], default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What a call gave, the generators that it moved, and what it read outside of the model."""

    results: Results
    moved: tuple[Generator, ...]
    reads: tuple[Read, ...]


def observed(flat: FlatModule, tensors: Sequence[torch.Tensor], rngs: Sequence[Generator], earlier: Sequence[Any] = ()) -> Observed:
    """A call.  A generator that it seeds itself, and so leaves as a call before did, has not moved: `earlier` holds such states."""
    before = states(rngs)
    with outside_reads(flat.model) as reads:
        outputs = results(flat, tensors)
    after = states(rngs)
    known = earlier or before
    moved = [
        one for one, was, was_earlier, now in zip(rngs, before, known, after, strict=True) if now not in (was, was_earlier)
    ]  # fmt: skip
    return Observed(results=outputs, moved=tuple(moved), reads=tuple(reads))


def outside_values(flat: FlatModule, tensors: Sequence[torch.Tensor], first: Results, call: Observed) -> tuple[Obstacle, ...]:
    """The obstacles that a call showed; `first` is what one before it gave, for the same inputs."""
    obstacles = []
    if call.moved:
        with put_back(call.moved):
            where, line = first_draw(call.moved, lambda: results(flat, tensors))
        rule = "python-random" if _drawn_decides(flat, tensors, call) else "unused-random"
        names = " and ".join([rng.name for rng in call.moved])
        obstacles.append(Obstacle(rule=rule, message=f"{flat.entry}() draws random numbers from {names}", where=where, source=line))
    clocks = [read for read in call.reads if read.function not in SYSTEM]
    if clocks:
        rule = "clock-read" if _time_decides(flat, tensors, first, call, clocks) else "unused-clock"
        message = f"{flat.entry}() reads the clock with {clocks[0].name}()"
        obstacles.append(Obstacle(rule=rule, message=message, where=clocks[0].where, source=clocks[0].source))
    return tuple(obstacles)


def unrepeated(
    flat: FlatModule, tensors: Sequence[torch.Tensor], call: Observed, bound: float, written: tuple[str, str]
) -> tuple[Obstacle, ...]:
    """The obstacle of a model that gives other results for the same inputs, by more than `bound`, on the CPU, where that is not
    rounding.  `written`: (file:line, source line) of the model's method."""
    if any(result.is_cuda for result in call.results):
        return ()
    error = apart(results(flat, tensors), results(flat, tensors))
    if error <= bound:
        return ()
    system = [read for read in call.reads if read.function in SYSTEM]
    where, line, how = (system[0].where, system[0].source, f", and reads {system[0].name}()") if system else (*written, "")
    message = f"{flat.entry}() gives other results for the same inputs, by {error:.1e}{how}"
    return (Obstacle(rule="unrepeatable-result", message=message, where=where, source=line),)


def _drawn_decides(flat: FlatModule, tensors: Sequence[torch.Tensor], call: Observed) -> bool:
    """Whether results differ with other numbers: those at either end of their range, where that is known, and a few more."""
    with put_back(call.moved):
        begun = [rng.read() for rng in call.moved]
        ends = [rng.ends(state) for rng, state in zip(call.moved, begun, strict=True)]
        if not all(ends):
            return True
        again = []
        for chosen in [begun, begun, *zip(*ends, strict=True), *[()] * ORDINARY]:
            for rng, state in zip(call.moved, chosen, strict=False):
                rng.write(state)
            try:
                with guarded_indices(flat.device):
                    again.append(results(flat, tensors))
            except FAILURES:
                return True
    one, other, *more = again
    noise = apart(one, other)
    return any(apart(one, result) > SPREADS * noise for result in more)


def _time_decides(
    flat: FlatModule, tensors: Sequence[torch.Tensor], first: Results, call: Observed, clocks: Sequence[Read]
) -> bool:
    """Whether results differ at another time.  Of a clock that cannot be put forward that is not known."""
    noise = apart(first, call.results)
    on_gpu = any(result.is_cuda for result in call.results)
    if (noise and not on_gpu) or not all(read.name.startswith("time.") for read in clocks):
        return True
    for seconds in STEPS:
        with put_forward(clocks, seconds):
            try:
                later = results(flat, tensors)
            except FAILURES:
                return True
        if apart(call.results, later) > SPREADS * noise:
            return True
    return False
