"""Runs one operator at a short size and padded at a long one, on the run's values and on other possible values of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ...model.devices.index_guard import FAILURES
from .padded_call import Body, ChangedByPadding, PaddedCall, place_of
from .padded_values import PaddedDimension, PaddedValue, Spot, Variation, alike, front, padded_part, placed, same, same_spot, spots
from .row_axes import kept_rows, moves

INDEXING = ("index", "gather", "embedding", "scatter", "take", "select", "put", "one_hot")
"""Parts of the names of operators that use integers as indices."""

ORDERING = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "median", "nanmedian", "kthvalue", "mode"})
"""Operators that may choose any of several equal elements.  So their trials do not set all elements of the call to zero."""

LARGE = 2**16
"""From this number of elements on, an operator that is known to keep rows separate is not tried.  One that only moves
elements is tried with other values once.  Otherwise the trials would take most of the time."""


def padded_operator(call: PaddedCall, along: PaddedDimension) -> Any:
    """Returns an operator's results at both sizes, after trials with other values.  Raises ChangedByPadding if they differ."""
    base = {id(value): (value.short, value.long) for value in call.values}
    short, spec = tree_flatten(run_once(call, call.at_short, base))
    long, other = tree_flatten(run_once(call, call.at_long, base))
    why = f"{call.name} combines elements along {along.name}{place_of(call.node)}"
    if spec != other:
        raise ChangedByPadding(why)
    trials = [(short, long)]
    full = not any(value.depends and not isinstance(value.short, torch.Tensor) for value in call.values)
    kept, moved = _kept_spot(call), _moved(call)
    for outcome in _variations(call, spec, along.generator, moved) if call.depends and not kept else ():
        if isinstance(outcome, str):
            raise ChangedByPadding(why)
        if outcome is None:
            full = False
        else:
            trials.append(outcome)
    full = full and not (kept or moved)
    leaves = [_padded_value([(one[at], two[at]) for one, two in trials], call, along, full, why, kept) for at in range(len(short))]
    return tree_unflatten(leaves, spec)


def run_once(call: PaddedCall, run: Callable[[Any], Any], chosen: Mapping[int, tuple[Any, Any]]) -> Any:
    """Runs a call at one of the sizes.  Raises ChangedByPadding if it fails."""
    try:
        return run(chosen)
    except FAILURES as failure:
        raise ChangedByPadding(f"{call.name} fails ({type(failure).__name__}){place_of(call.node)}") from failure


def _variations(
    call: PaddedCall, spec: TreeSpec, generator: torch.Generator, moved: bool
) -> Iterator[tuple[list[Any], list[Any]] | str | None]:
    """Yields the results of other values at both sizes; "fails" if the long size alone fails, or returns another structure; None if
    a trial shows nothing."""
    entrywise = _pointwise(call.node)
    vary = partial(Variation, indices=_indexes(call), entrywise=entrywise, literal=_literal(call.node))
    for variation in [vary(0, mixed=True)] if moved else [vary(-1), vary(1), vary(0, mixed=call.name in ORDERING)]:
        chosen = {id(value): value.varied(variation, generator) for value in call.values}
        try:
            short, structure = tree_flatten(call.at_short(chosen))
        except FAILURES:
            yield None
            continue
        try:
            long, other = tree_flatten(call.at_long(chosen))
        except FAILURES:
            yield None if entrywise else "fails"
            continue
        yield (short, long) if structure == other == spec else "fails"


def _indexes(call: PaddedCall) -> bool:
    """Whether integers among the arguments may be indices: the operator's name has a part in INDEXING, or it also takes other
    dtypes or bodies."""
    dtypes = [value.short.dtype for value in call.values if isinstance(value.short, torch.Tensor)]
    integers = [not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool) for dtype in dtypes]
    bodies = any(isinstance(leaf, Body) for leaf in tree_leaves(call.short))
    return any(word in call.name for word in INDEXING) or (any(integers) and (bodies or not all(integers)))


def _padded_value(
    trials: Sequence[tuple[Any, Any]], call: PaddedCall, along: PaddedDimension, full: bool, why: str, kept_spot: Spot
) -> PaddedValue:
    """Returns one result of an operator, after finding the short result in the long one.  `trials` begins with the run's values.

    `full`: all variations were tried, so that elements which are equal in all of them are fixed.  `kept_spot`: see `_kept_spot`.
    """
    short, long = trials[0]
    if not isinstance(short, torch.Tensor):
        equal = not call.depends or all(one == two or (one != one and two != two) for one, two in trials)
        return PaddedValue(short, long, depends=call.depends, why="" if equal else why)
    if short.shape == long.shape:
        if all(alike(one, two) for one, two in trials):
            return PaddedValue(short, short, depends=call.depends)
        return PaddedValue(short, long, depends=call.depends, why=why)
    if short.dim() == long.dim():
        for spot in [kept_spot] if kept_spot else spots(short, long, along.sizes, along.last):
            if all(two.shape == long.shape and alike(one, front(two, spot)) for one, two in trials):
                fixed = _fixed([two[padded_part(spot, long.shape)] for _, two in trials], call.depends, full)
                padded_long = long if torch.equal(short, front(long, spot)) else placed(long, spot, short)
                return PaddedValue(short, padded_long, spot, fixed, depends=call.depends)
    return PaddedValue(short, long, depends=call.depends, why=why)


def _fixed(padded: Sequence[torch.Tensor], depends: bool, full: bool) -> torch.Tensor | None:
    """Returns a mask of the padded elements that are equal in all trials, or None for none."""
    if depends and not full:
        return None
    fixed = torch.ones_like(padded[0], dtype=torch.bool)
    for other in padded[1:]:
        fixed &= same(padded[0], other)
        if not bool(fixed.any()):
            return None
    return fixed


def _kept_spot(call: PaddedCall) -> Spot:
    """Returns the call's spot in the result of a large operator that keeps its rows separate, or () if trials must find it.

    Padded elements of its inputs must not be fixed.  The result counts as having no fixed elements, which is always safe.
    """
    values, combined_axes = kept_rows(call.node, call.short)
    if _pointwise(call.node):
        values = [value for value in call.values if value.spot]
    numbers = [[leaf for leaf in tree_leaves(args) if not isinstance(leaf, PaddedValue)] for args in (call.short, call.long)]
    if not _large_and_free(values) or numbers[0] != numbers[1]:
        return ()
    spot = values[0].spot
    others = [value for value in call.values if not any(value is kept_value for kept_value in values)]
    differ = any(value.spot or value.long is not value.short for value in others)
    wider = any(isinstance(value.short, torch.Tensor) and value.short.dim() > len(spot) for value in others)
    if differ or wider or not all(same_spot(value.spot, spot) for value in values):
        return ()
    full = all(isinstance(spot[axis], slice) and spot[axis] == slice(None) for axis in combined_axes)
    return spot if full else ()


def _moved(call: PaddedCall) -> bool:
    """Whether a large operator only moves floating-point numbers.  One trial with random numbers shows where they are."""
    values = [value for value in call.values if value.spot]
    return moves(call.node) and _large_and_free(values) and all(value.long.is_floating_point() for value in values)


def _large_and_free(values: Sequence[PaddedValue]) -> bool:
    """Whether there are padded values, all with unknown padded elements, and the first one is large."""
    free = all(value.spot and value.depends and value.fixed is None for value in values)
    return bool(values) and free and values[0].long.numel() >= LARGE


def _pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _literal(node: Node) -> float:
    """Returns the first number among a node's arguments that an int32 can hold, or 0."""
    numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, int | float) and abs(arg) < 2**31]
    return numbers[0] if numbers else 0
