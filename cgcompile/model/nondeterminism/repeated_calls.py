"""Compares calls with the same inputs: whether the results depend on random numbers of Python or NumPy, or on the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ModelError
from ...util.tolerance import compare
from ..devices.index_guard import FAILURES, guarded_indices
from ..flat_module import EagerResult, FlatModule, run_eager
from ..side_effects import Obstacle
from ..source import SEED
from ..user_code import first_line, user_line
from .clock_reads import CLOCKS, STEPS, SYSTEM, Read, outside_reads, put_forward
from .generators import Generator, first_draw, put_back, states
from .outside_effects import Variable, changed, effects, variables

Results = tuple[torch.Tensor, ...]
"""Outputs, and the buffers after the call."""

ORDINARY = 4
"""Number of calls with other random numbers, besides those with numbers at either end of their range."""

AGAIN_FIX = (
    "a call changes something that limits the number of calls, as a position in a cache does: let it start again from 0 "
    "(position % size), or pass it as an input"
)

SPREADS = 4.0
"""Results on a GPU differ by rounding.  A difference more than this many times larger is not rounding."""


def results(flat: FlatModule, tensors: Sequence[torch.Tensor]) -> Results:
    """Runs one call with a fixed torch seed."""
    with torch.random.fork_rng(devices=sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})):
        torch.manual_seed(SEED)
        result = called_again(flat, tensors)
    return (*result.outputs, *result.state.values())


def called_again(flat: FlatModule, tensors: Sequence[torch.Tensor], *, keep: bool = False) -> EagerResult:
    """Calls the model with inputs that an earlier call accepted.  Raises eager-failed if it fails now: the calls changed it."""
    try:
        return run_eager(flat, tensors, keep=keep)
    except FAILURES as error:
        where = user_line(error, "model") or "model"
        text = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            "eager-failed", f"{where}: a repeated call of {flat.entry}() fails, and an earlier one did not: {text}", AGAIN_FIX
        ) from error


def apart(one: Results, other: Results) -> float:
    """Returns the largest error of `other` compared with `one`."""
    return max([compare(want, got).error for want, got in zip(one, other, strict=True)], default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The results of a call, the generators and variables outside of the model that it changed, its prints, and its reads of clocks
    and random bytes."""

    results: Results
    moved: tuple[Generator, ...]
    variables: tuple[Variable, ...]
    reads: tuple[Read, ...]


def observed(flat: FlatModule, tensors: Sequence[torch.Tensor], rngs: Sequence[Generator], earlier: Sequence[Any] = ()) -> Observed:
    """Runs a call, and observes generators and reads.  A generator that the call itself seeds has the same state as after an
    earlier call (in `earlier`).  It does not count as changed."""
    outside = variables(flat.model, flat.entry)
    before, values = states(rngs), states(outside)
    with outside_reads(flat.model) as reads:
        outputs = results(flat, tensors)
    after, changed_variables = states(rngs), changed(values, states(outside), outside)
    earlier_states = earlier or before
    moved = [
        rng for rng, old, earlier_state, new in zip(rngs, before, earlier_states, after, strict=True)
        if new not in (old, earlier_state)
    ]  # fmt: skip
    return Observed(results=outputs, moved=tuple(moved), variables=changed_variables, reads=tuple(reads))


def outside_effects(flat: FlatModule, tensors: Sequence[torch.Tensor], call: Observed) -> tuple[Obstacle, ...]:
    """Returns what a call did outside of the model and its results."""
    return effects(flat.entry, call.variables, call.reads, lambda: results(flat, tensors))


def outside_values(flat: FlatModule, tensors: Sequence[torch.Tensor], first: Results, call: Observed) -> tuple[Obstacle, ...]:
    """Returns the obstacles that a call showed.  `first` has the results of an earlier call with the same inputs."""
    obstacles = []
    if call.moved:
        with put_back(call.moved):
            where, line = first_draw(call.moved, lambda: results(flat, tensors))
        rule = "python-random" if _depends_on_random(flat, tensors, call) else "unused-random"
        names = " and ".join([rng.name for rng in call.moved])
        obstacles.append(Obstacle(rule=rule, message=f"{flat.entry}() draws random numbers from {names}", where=where, source=line))
    clocks = [read for read in call.reads if read.function in CLOCKS]
    if clocks:
        rule = "clock-read" if _depends_on_time(flat, tensors, first, call, clocks) else "unused-clock"
        message = f"{flat.entry}() reads the clock with {clocks[0].name}()"
        obstacles.append(Obstacle(rule=rule, message=message, where=clocks[0].where, source=clocks[0].source))
    return tuple(obstacles)


def unrepeated(
    flat: FlatModule, tensors: Sequence[torch.Tensor], call: Observed, bound: float, written: tuple[str, str]
) -> tuple[Obstacle, ...]:
    """Returns an obstacle if two calls on the CPU with the same inputs differ by more than `bound`, which rounding does not
    explain.  `written` is (file:line, source line) of the model's method."""
    if any(result.is_cuda for result in call.results):
        return ()
    error = apart(results(flat, tensors), results(flat, tensors))
    if error <= bound:
        return ()
    system = [read for read in call.reads if read.function in SYSTEM]
    where, line, how = (system[0].where, system[0].source, f"; it reads {system[0].name}()") if system else (*written, "")
    message = f"two calls of {flat.entry}() with the same inputs differ by {error:.1e}{how}"
    return (Obstacle(rule="unrepeatable-result", message=message, where=where, source=line),)


def _depends_on_random(flat: FlatModule, tensors: Sequence[torch.Tensor], call: Observed) -> bool:
    """Returns whether results change with random numbers at both ends of their range, and with ORDINARY other draws.  Returns True
    if the ends are unknown, or if a call fails."""
    with put_back(call.moved):
        original_states = [rng.read() for rng in call.moved]
        ends = [rng.ends(state) for rng, state in zip(call.moved, original_states, strict=True)]
        if not all(ends):
            return True
        runs = []
        for chosen in [original_states, original_states, *zip(*ends, strict=True), *[()] * ORDINARY]:
            for rng, state in zip(call.moved, chosen, strict=False):
                rng.write(state)
            try:
                with guarded_indices(flat.device):
                    runs.append(results(flat, tensors))
            except ModelError:
                return True
    one, other, *others = runs
    noise = apart(one, other)
    return any(apart(one, result) > SPREADS * noise for result in others)


def _depends_on_time(
    flat: FlatModule, tensors: Sequence[torch.Tensor], first: Results, call: Observed, clocks: Sequence[Read]
) -> bool:
    """Returns True also for a clock that cannot be set forward."""
    noise = apart(first, call.results)
    on_gpu = any(result.is_cuda for result in call.results)
    if (noise and not on_gpu) or not all(read.name.startswith("time.") for read in clocks):
        return True
    for seconds in STEPS:
        with put_forward(clocks, seconds):
            try:
                later = results(flat, tensors)
            except ModelError:
                return True
        if apart(call.results, later) > SPREADS * noise:
            return True
    return False
