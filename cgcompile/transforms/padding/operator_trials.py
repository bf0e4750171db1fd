"""One operator at a short size and padded at a long one, on the values of the run and on others that its inputs may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from .padded_call import FAILURES, ChangedByPadding, PaddedCall, place_of
from .padded_values import PaddedDimension, PaddedValue, Spot, Variation, alike, front, padded_part, placed, same, same_spot, spots

INDEXING = ("index", "gather", "embedding", "scatter", "take", "select", "put", "one_hot")
"""What the names of operators contain that take integers as positions."""

ORDERING = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "median", "nanmedian", "kthvalue", "mode"})
"""Operators that may choose any of several equal entries: not tried with zeros alone."""

LARGE = 2**20
"""Entries from which an operator that computes them one by one is believed to: trying others takes longer than all else."""


def padded_operator(call: PaddedCall, along: PaddedDimension) -> Any:
    """What an operator gives at both sizes, where other values show it to be the same in both.  Raises ChangedByPadding."""
    base = {id(value): (value.short, value.long) for value in call.values}
    short, spec = tree_flatten(run_once(call, call.at_short, base))
    long, other = tree_flatten(run_once(call, call.at_long, base))
    why = f"{call.name} joins what lies along {along.name}{place_of(call.node)}"
    if spec != other:
        raise ChangedByPadding(why)
    tried = [(short, long)]
    whole = not any(value.depends and not isinstance(value.short, torch.Tensor) for value in call.values)
    kept = _kept_spot(call)
    for found in _variations(call, spec, along.generator) if call.depends and not kept else ():
        if isinstance(found, str):
            raise ChangedByPadding(why)
        if found is None:
            whole = False
        else:
            tried.append(found)
    made = [_found([(one[at], two[at]) for one, two in tried], call, along, whole, why, kept) for at in range(len(short))]
    return tree_unflatten(made, spec)


def run_once(call: PaddedCall, run: Callable[[Any], Any], given: Mapping[int, tuple[Any, Any]]) -> Any:
    """What a call gives at one of the sizes.  Raises ChangedByPadding where it fails there."""
    try:
        return run(given)
    except FAILURES as failure:
        raise ChangedByPadding(f"{call.name} fails ({type(failure).__name__}){place_of(call.node)}") from failure


def _variations(call: PaddedCall, spec: TreeSpec, generator: torch.Generator) -> Iterator[tuple[list[Any], list[Any]] | str | None]:
    """What other values give: at both sizes, "fails" where only the long size fails, None where both do."""
    entrywise = _pointwise(call.node)
    ways = partial(Variation, indices=any(word in call.name for word in INDEXING), entrywise=entrywise, literal=_literal(call.node))
    for variation in (ways(-1), ways(1), ways(0, mixed=call.name in ORDERING)):
        given = {id(value): value.varied(variation, generator) for value in call.values}
        try:
            short, structure = tree_flatten(call.at_short(given))
        except FAILURES:
            yield None
            continue
        try:
            long, other = tree_flatten(call.at_long(given))
        except FAILURES:
            yield None if entrywise else "fails"
            continue
        yield (short, long) if structure == other == spec else "fails"


def _found(
    tried: Sequence[tuple[Any, Any]], call: PaddedCall, along: PaddedDimension, whole: bool, why: str, kept: Spot
) -> PaddedValue:
    """One value that an operator gives, found in what it gives at the long size; `tried` begins with the values of the run.

    `whole`: all variations were tried, so that what is the same in all is fixed.  `kept`: see `_kept_spot`.
    """
    short, long = tried[0]
    if not isinstance(short, torch.Tensor):
        equal = not call.depends or all(one == two or (one != one and two != two) for one, two in tried)
        return PaddedValue(short, long, depends=call.depends, why="" if equal else why)
    if short.shape == long.shape:
        if all(alike(one, two) for one, two in tried):
            return PaddedValue(short, short, depends=call.depends)
        return PaddedValue(short, long, depends=call.depends, why=why)
    if short.dim() == long.dim():
        for spot in [kept] if kept else spots(short, long, along.sizes, along.last):
            if all(two.shape == long.shape and alike(one, front(two, spot)) for one, two in tried):
                fixed = None if kept else _fixed([two[padded_part(spot, long.shape)] for _, two in tried], call.depends, whole)
                joined = long if torch.equal(short, front(long, spot)) else placed(long, spot, short)
                return PaddedValue(short, joined, spot, fixed, depends=call.depends)
    return PaddedValue(short, long, depends=call.depends, why=why)


def _fixed(padded: Sequence[torch.Tensor], depends: bool, whole: bool) -> torch.Tensor | None:
    """Which of the padded entries are the same in all that was tried, None for none."""
    if depends and not whole:
        return None
    fixed = torch.ones_like(padded[0], dtype=torch.bool)
    for other in padded[1:]:
        fixed &= same(padded[0], other)
        if not bool(fixed.any()):
            return None
    return fixed


def _kept_spot(call: PaddedCall) -> Spot:
    """Where the call lies in what a large operator gives that computes entry by entry, () where that has to be tried.

    No padded entry of its inputs may be fixed: none of the result is called fixed, which is more than they have to be.
    """
    values = [value for value in call.values if value.spot]
    numbers = [[leaf for leaf in tree_leaves(each) if not isinstance(leaf, PaddedValue)] for each in (call.short, call.long)]
    apart = any(value.long is not value.short for value in call.values if not value.spot)
    if not _pointwise(call.node) or not values or apart or numbers[0] != numbers[1]:
        return ()
    spot = values[0].spot
    if any(value.fixed is not None or not same_spot(value.spot, spot) for value in values):
        return ()
    wider = any(isinstance(value.short, torch.Tensor) and value.short.dim() > len(spot) for value in call.values)
    return () if wider or values[0].long.numel() < LARGE else spot


def _pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _literal(node: Node) -> float:
    """The first number among a node's arguments that an integer holds, 0 without."""
    found = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, int | float) and abs(each) < 2**31]
    return found[0] if found else 0
