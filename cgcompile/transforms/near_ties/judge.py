"""Whether what a compiled program gave is what eager PyTorch gives for choices that are as good as its own.

Eager PyTorch runs the program once more.  Every selected index that reaches something compared is read from what the compiled
program gave, and eager PyTorch takes it where the float that it points at is within tolerance.  All else is then compared with
this run.  A choice that reaches nothing as an index is searched for: TRIES runs, each with one nearly equal element more.
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
"""Runs in which choices are read: later ones may appear, or change their places, only when earlier ones are made."""

TRIES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What calls gave: the outputs of each, in order, and what is compared after the last, as `self_test_tensors` has it."""

    calls: tuple[tuple[Tensor, ...], ...]
    left: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was compared, tensor by tensor.  `expected`: what eager PyTorch gives for the same choices.  `indices`: of each tensor
    how many elements are selected indices, and how many of these eager PyTorch selects otherwise when nobody tells it."""

    differences: tuple[Difference, ...]
    expected: tuple[Tensor, ...]
    indices: tuple[tuple[int, int], ...]


Run = Callable[[], Seen]
"""Runs the calls in eager PyTorch from the first state on; what it gives has not been put back when it returns."""


def judged(run: Run, got: Seen, bounds: Sequence[ErrorBound], floor: float = 0.0) -> Verdict | None:
    """How far `got` is from eager PyTorch that makes the same choices where they are as good as its own.  None where that is not
    within `bounds`, or nothing was selected.  `floor`: the least bound of floats that are selected from."""
    wanted: Wanted = {}
    turned: dict[int, Tensor] = {}
    trial = _trial(run, got, wanted, floor)
    if not trial.guided.selections:
        return None
    for _ in range(PASSES):
        turned = _with_filters(turned, trial.guided)
        read = _read(trial, got) | turned
        if not read or _same(read, wanted):
            break
        wanted, trial = read, _trial(run, got, read, floor)
    if not _within(trial.differences, bounds):
        alternative = _searched(run, got, bounds, wanted, floor)
        if alternative is None:
            return None
        trial = alternative
    counts = tuple([_counted(trial, tensor) for tensor in trial.eager.left])
    expected = tuple([tensor.detach() for tensor in trial.eager.left])
    return Verdict(differences=trial.differences, expected=expected, indices=counts)


def near_ties(run: Run, floor: float = 0.0) -> tuple[float, ...]:
    """Of each tensor that is compared the share of elements that are selected indices with another one as good: on another
    processor rounding may select that one.  `floor` as in `judged`."""
    guided = GuidedRun({}, floor, ties=True)
    with torch.no_grad(), guided:
        left = run().left
    return tuple([_tied(guided, tensor) / max(1, tensor.numel()) for tensor in left])


def judged_beside(
    run: Run, expected: Sequence[Tensor], got: Seen, bounds: Sequence[ErrorBound], floor: float = 0.0
) -> Verdict | None:
    """`judged`, where eager PyTorch runs the exported program, and the user's model gave `expected`: both have to agree, too."""
    last = got.left[: len(got.calls[-1])]
    model = Seen(calls=(tuple(expected[: len(last)]),), left=tuple(expected))
    return judged(run, got, bounds, floor) if judged(run, model, bounds, floor) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A guided run, what it gave, and how far the compiled program is from that."""

    guided: GuidedRun
    eager: Seen
    differences: tuple[Difference, ...]


def _trial(run: Run, got: Seen, wanted: Wanted, floor: float, explore: bool = False) -> _Trial:
    guided = GuidedRun(wanted, floor, explore)
    with torch.no_grad(), guided:
        eager = run()
    pairs = zip(eager.left, got.left, strict=True)
    return _Trial(guided=guided, eager=eager, differences=tuple([compare(want.to(other.device), other) for want, other in pairs]))


def _read(trial: _Trial, got: Seen) -> dict[int, Tensor]:
    """The choices that the compiled program made, as far as they reach what it gave; none where this run made the same."""
    ours = [tensor for call in trial.eager.calls[-len(got.calls) :] for tensor in call] + list(trial.eager.left)
    theirs = [tensor for call in got.calls for tensor in call] + list(got.left)
    selections = trial.guided.selections
    same: list[tuple[Tensor, Tensor]] = []
    others: list[tuple[Tensor, Tensor]] = []
    for eager_tensor, compiled_tensor in zip(ours, theirs, strict=True):
        origins = trial.guided.origins.of(eager_tensor)
        if origins is None or eager_tensor.shape != compiled_tensor.shape:
            continue
        numbers, scales, _ = origins.reshape(3, -1).cpu()
        here = numbers >= 0
        numbers, scales = numbers[here], scales[here]
        apart = (_whole(compiled_tensor) - _whole(eager_tensor))[here]
        fits = apart % scales == 0
        numbers, apart = numbers[fits], (apart // scales)[fits]
        for rows, of in ((same, apart == 0), (others, apart != 0)):
            rows.append((numbers[of], selected(selections, numbers[of])[0] + apart[of]))
    if not any(len(numbers) for numbers, _ in others):
        return {}
    rows = [*same, *others]  # of two places of one index that differ, the one that differs from this run counts
    return asked(selections, torch.cat([part for part, _ in rows]), torch.cat([part for _, part in rows]))


def _with_filters(turned: dict[int, Tensor], guided: GuidedRun) -> dict[int, Tensor]:
    """Comparisons to turn over, those of `turned` and the run's `filters`, by their numbers among the selections."""
    numbers = torch.tensor(sorted(guided.filters), dtype=torch.int64)
    if not len(numbers):
        return turned
    turned_filters = asked(guided.selections, numbers, 1 - selected(guided.selections, numbers)[1])
    both = {number: torch.maximum(turned_filters[number], turned[number]) for number in turned_filters.keys() & turned.keys()}
    return {**turned, **turned_filters, **both}


def _whole(tensor: Tensor) -> Tensor:
    """The elements as whole numbers, flat."""
    flat = tensor.detach().cpu().reshape(-1)
    return (flat.double().round() if flat.is_floating_point() else flat).long()


def _same(one: Wanted, other: Wanted) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[number], other[number]) for number in one)


def _within(differences: Sequence[Difference], bounds: Sequence[ErrorBound]) -> bool:
    return all(difference.error <= bound.bound for difference, bound in zip(differences, bounds, strict=True))


def _searched(run: Run, got: Seen, bounds: Sequence[ErrorBound], wanted: Wanted, floor: float) -> _Trial | None:
    """A run that is within the bounds with other choices of nearly equal elements that nobody can see: the closest first, each kept
    that brings the run nearer.  None after TRIES runs."""
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
    """The choices with another index at a place; where the row has that one already, the two change places."""
    changed = selection.chosen.cpu().clone()
    first = place - place % selection.ranks
    row = changed[first : first + selection.ranks]
    row[row == index] = int(changed[place])
    changed[place] = index
    return changed


def _distance(trial: _Trial, bounds: Sequence[ErrorBound]) -> float:
    """How much of the tensors is beyond the bounds."""
    pairs = zip(trial.differences, bounds, strict=True)
    return sum([1 + min(difference.error, 1e6) for difference, bound in pairs if difference.error > bound.bound])


def _counted(trial: _Trial, tensor: Tensor) -> tuple[int, int]:
    """How many elements are selected indices, and how many of these eager PyTorch selects otherwise."""
    origins = trial.guided.origins.of(tensor)
    if origins is None:
        return 0, 0
    numbers = origins[0].reshape(-1).cpu()
    numbers = numbers[numbers >= 0]
    chosen, expected = selected(trial.guided.selections, numbers)
    return len(numbers), int((chosen != expected).sum())


def _tied(guided: GuidedRun, tensor: Tensor) -> int:
    """How many elements are selected indices with another one as good."""
    origins = guided.origins.of(tensor)
    if origins is None:
        return 0
    numbers = origins[0].reshape(-1).cpu()
    ties = torch.cat([selection.ties.cpu() for selection in guided.selections if selection.ties is not None])
    return int(ties[numbers[numbers >= 0]].sum())


def indices_text(bounds: Sequence[ErrorBound], indices: Sequence[Sequence[tuple[int, int]]]) -> str:
    """`output token (int64): 2 of 64 indices differ from eager PyTorch's, where the values are equal within tolerance`, of all
    tensors with such indices; "" without any.  `indices`: as verdicts have them."""
    sentences = []
    for place, bound in enumerate(bounds):
        total, other = [sum(index[place][at] for index in indices if index) for at in (0, 1)]
        if other:
            sentences.append(
                f"{bound.title}: {other} of {total} indices differ from eager PyTorch's where the values are equal within tolerance"
            )
    return "; ".join(sentences)
