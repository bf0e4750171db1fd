"""Checks whether the results of a compiled program equal those of eager PyTorch, except for choices of nearly equal elements.

Every selected index that reaches a compared tensor is read from the results of the compiled program.  Eager PyTorch runs the
program again, and uses such an index if the float at it is within tolerance.  All other results are then compared with this run.  A
choice that reaches no compared tensor as an index is searched for, in up to TRIES runs.  Each run selects one more nearly equal
element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...util.tolerance import Difference, compare
from ..error_bounds import ErrorBound
from .guided_run import GuidedRun, RunSelection, Wanted, asked, selected

PASSES = 8
"""The most runs in which choices are read.  Later choices may change when earlier ones are made."""

TRIES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The results of calls: the outputs of each call, in order, and the tensors that are compared after the last call, as in
    `self_test_tensors`."""

    calls: tuple[tuple[Tensor, ...], ...]
    compared: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The comparison, tensor by tensor.  `expected`: the results of eager PyTorch with the same choices.  `indices`: per tensor,
    how many elements are selected indices, and how many of these differ from eager PyTorch's own choices."""

    differences: tuple[Difference, ...]
    expected: tuple[Tensor, ...]
    indices: tuple[tuple[int, int], ...]


Run = Callable[[], Seen]
"""Runs the calls in eager PyTorch from the initial state.  It does not reset the state at its end, so results can be tensors of the
state."""


def judged(run: Run, got: Seen, bounds: Sequence[ErrorBound], floor: float = 0.0) -> Verdict | None:
    """Compares `got` with eager PyTorch that makes the same choices, if they are as good as its own.  Returns None if the
    difference exceeds `bounds`, or if nothing was selected.  `floor`: the smallest bound of floats that are selected from."""
    wanted: Wanted = {}
    inverted: dict[int, Tensor] = {}
    trial = _trial(run, got, wanted, floor)
    if not trial.guided.selections:
        return None
    for _ in range(PASSES):
        inverted = _with_filters(inverted, trial.guided)
        read = _read(trial, got) | inverted
        if not read or _same(read, wanted):
            break
        wanted, trial = read, _trial(run, got, read, floor)
    if not _within(trial.differences, bounds):
        alternative = _searched(run, got, bounds, wanted, floor)
        if alternative is None:
            return None
        trial = alternative
    counts = tuple([_counted(trial, tensor) for tensor in trial.eager.compared])
    expected = tuple([tensor.detach() for tensor in trial.eager.compared])
    return Verdict(differences=trial.differences, expected=expected, indices=counts)


def near_ties(run: Run, floor: float = 0.0) -> tuple[float, ...]:
    """Returns per compared tensor the share of elements that are selected indices with an alternative that is as good.  Rounding on
    another processor may select the alternative.  `floor`: as in `judged`."""
    guided = GuidedRun({}, floor, ties=True)
    with torch.no_grad(), guided:
        tensors = run().compared
    return tuple([_tied(guided, tensor) / max(1, tensor.numel()) for tensor in tensors])


def judged_beside(
    run: Run, expected: Sequence[Tensor], got: Seen, bounds: Sequence[ErrorBound], floor: float = 0.0
) -> Verdict | None:
    """Runs `judged` on the exported program.  `expected`: results of the user's model.  Also returns None if they do not agree with
    the results of `run`."""
    last = got.compared[: len(got.calls[-1])]
    model = Seen(calls=(tuple(expected[: len(last)]),), compared=tuple(expected))
    return judged(run, got, bounds, floor) if judged(run, model, bounds, floor) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A guided run, its results, and their differences from the compiled program's."""

    guided: GuidedRun
    eager: Seen
    differences: tuple[Difference, ...]


def _trial(run: Run, got: Seen, wanted: Wanted, floor: float, explore: bool = False) -> _Trial:
    guided = GuidedRun(wanted, floor, explore)
    with torch.no_grad(), guided:
        eager = run()
    pairs = zip(eager.compared, got.compared, strict=True)
    return _Trial(guided=guided, eager=eager, differences=tuple([compare(want.to(other.device), other) for want, other in pairs]))


def _read(trial: _Trial, got: Seen) -> dict[int, Tensor]:
    """Returns the choices of the compiled program that reach its results, or {} if this run made the same choices."""
    eager_tensors = [tensor for call in trial.eager.calls[-len(got.calls) :] for tensor in call] + list(trial.eager.compared)
    compiled_tensors = [tensor for call in got.calls for tensor in call] + list(got.compared)
    selections = trial.guided.selections
    equal: list[tuple[Tensor, Tensor]] = []
    different: list[tuple[Tensor, Tensor]] = []
    for eager_tensor, compiled_tensor in zip(eager_tensors, compiled_tensors, strict=True):
        origins = trial.guided.origins.of(eager_tensor)
        if origins is None or eager_tensor.shape != compiled_tensor.shape:
            continue
        numbers, scales, _ = origins.reshape(3, -1).cpu()
        is_index = numbers >= 0
        numbers, scales = numbers[is_index], scales[is_index]
        offsets = (_as_integers(compiled_tensor) - _as_integers(eager_tensor))[is_index]
        fits = offsets % scales == 0
        numbers, offsets = numbers[fits], (offsets // scales)[fits]
        for rows, matching in ((equal, offsets == 0), (different, offsets != 0)):
            rows.append((numbers[matching], selected(selections, numbers[matching])[0] + offsets[matching]))
    if not any(len(numbers) for numbers, _ in different):
        return {}
    rows = [*equal, *different]  # if an index occurs twice, the later entry counts: one that differs from this run
    return asked(selections, torch.cat([part for part, _ in rows]), torch.cat([part for _, part in rows]))


def _with_filters(inverted: dict[int, Tensor], guided: GuidedRun) -> dict[int, Tensor]:
    """Returns the comparisons to invert, by selection: those of `inverted`, and the run's `filters`."""
    numbers = torch.tensor(sorted(guided.filters), dtype=torch.int64)
    if not len(numbers):
        return inverted
    filters = asked(guided.selections, numbers, 1 - selected(guided.selections, numbers)[1])
    both = {number: torch.maximum(filters[number], inverted[number]) for number in filters.keys() & inverted.keys()}
    return {**inverted, **filters, **both}


def _as_integers(tensor: Tensor) -> Tensor:
    """Returns the elements as int64, flat.  Rounds floats."""
    flat = tensor.detach().cpu().reshape(-1)
    return (flat.double().round() if flat.is_floating_point() else flat).long()


def _same(one: Wanted, other: Wanted) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[number], other[number]) for number in one)


def _within(differences: Sequence[Difference], bounds: Sequence[ErrorBound]) -> bool:
    return all(difference.error <= bound.bound for difference, bound in zip(differences, bounds, strict=True))


def _searched(run: Run, got: Seen, bounds: Sequence[ErrorBound], wanted: Wanted, floor: float) -> _Trial | None:
    """Searches for a run within the bounds, with other choices of nearly equal elements, which no result contains.  Tries the
    closest first, and keeps a choice that reduces the distance.  Returns None after TRIES runs."""
    best = _trial(run, got, wanted, floor, explore=True)
    tried: set[tuple[int, int, int]] = set()
    for _ in range(TRIES):
        candidates = [
            (distance, number, place, index)
            for number, selection in enumerate(best.guided.selections)
            for distance, place, index in selection.alternatives
            if (number, place, index) not in tried
        ]
        if not candidates:
            return None
        _, number, place, index = min(candidates)
        tried.add((number, place, index))
        changed = _changed(best.guided.selections[number], place, index)
        trial = _trial(run, got, {**wanted, number: changed}, floor, explore=True)
        if _within(trial.differences, bounds):
            return trial
        if _distance(trial, bounds) < _distance(best, bounds):
            best, wanted = trial, {**wanted, number: changed}
    return None


def _changed(selection: RunSelection, place: int, index: int) -> Tensor:
    """Returns the choices with `index` at position `place`.  If the row already has this index, the two indices are exchanged."""
    changed = selection.chosen.cpu().clone()
    first = place - place % selection.ranks
    row = changed[first : first + selection.ranks]
    row[row == index] = int(changed[place])
    changed[place] = index
    return changed


def _distance(trial: _Trial, bounds: Sequence[ErrorBound]) -> float:
    """Returns a measure of how far the tensors exceed the bounds."""
    pairs = zip(trial.differences, bounds, strict=True)
    return sum([1 + min(difference.error, 1e6) for difference, bound in pairs if difference.error > bound.bound])


def _counted(trial: _Trial, tensor: Tensor) -> tuple[int, int]:
    """Returns how many elements are selected indices, and how many of these eager PyTorch selects differently."""
    origins = trial.guided.origins.of(tensor)
    if origins is None:
        return 0, 0
    numbers = origins[0].reshape(-1).cpu()
    numbers = numbers[numbers >= 0]
    chosen, expected = selected(trial.guided.selections, numbers)
    return len(numbers), int((chosen != expected).sum())


def _tied(guided: GuidedRun, tensor: Tensor) -> int:
    """Returns how many elements are selected indices with an alternative that is as good."""
    origins = guided.origins.of(tensor)
    if origins is None:
        return 0
    numbers = origins[0].reshape(-1).cpu()
    ties = torch.cat([selection.ties.cpu() for selection in guided.selections if selection.ties is not None])
    return int(ties[numbers[numbers >= 0]].sum())


def indices_text(bounds: Sequence[ErrorBound], indices: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Returns `output token (int64): 2 of 64 indices differ from eager PyTorch's where the values are equal within tolerance`.
    Names all tensors with such indices, "" if there are none.  `indices`: those of verdicts."""
    sentences = []
    for place, bound in enumerate(bounds):
        total, other = [sum(index[place][at] for index in indices if index) for at in (0, 1)]
        if other:
            sentences.append(
                f"{bound.title}: {other} of {total} indices differ from eager PyTorch's where the values are equal within tolerance"
            )
    return "; ".join(sentences)
