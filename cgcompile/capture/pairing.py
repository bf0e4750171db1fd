"""Which range of one process is which range of the other.  Pure.

The ranges of KEPT kinds are known.  Segments and allocations are not: two processes get them in any order.  They are paired
by the words that point at them.  A word of the same node that reads (range, offset) in one process and (range', offset) in the
other votes for the pair, if the ranges are alike in kind, size and key.  Garbage may vote too, but every real pointer votes for
the true pair.  A pair once taken is final for both sides; a pointer left without its pair is refused later, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .take import Range, RawGraph, RawKernel, RawMemcpy, RawMemset, RawSetCondition, Reading, Take, Word

KEPT = ("weights", "inputs", "state")
"""Kinds of ranges that are the same in every process, at the same position: the build itself places everything there, or an engine
named its tensors.  They are called as their memories are."""

Pairing = dict[int, int]
"""Range of the first process -> range of the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRanges:
    """The `ranges` of two takes and their `pairing`.  `hosts`, `pools`: positions of pinned host memory, and of private pools."""

    pairing: Pairing
    ranges: tuple[tuple[Range, ...], tuple[Range, ...]]
    hosts: tuple[frozenset[int], frozenset[int]]
    pools: tuple[frozenset[int], frozenset[int]]


def pair_takes(a: Take, b: Take) -> PairedRanges:
    """The ranges of two takes of the same graphs."""

    def of(kind: str) -> tuple[frozenset[int], frozenset[int]]:
        mine, theirs = (frozenset(i for i, piece in enumerate(take.ranges) if piece.kind == kind) for take in (a, b))
        return mine, theirs

    return PairedRanges(pairing=pair_ranges(a, b), ranges=(a.ranges, b.ranges), hosts=of("host"), pools=of("pool"))


def meaning(mine: Word, theirs: Word, paired: PairedRanges) -> Reading | None:
    """The place that a word means, which is an address in both processes; None when they do not agree on one.  Both may also mean
    different places of the graph's own pool: of free blocks of one size torch's allocator takes the lowest.  Then the first
    process's choice counts; the replay over poisoned memory shows that it agrees with the other words.  An address that ends one
    segment and begins the next is the beginning, unless the other process can only read it as an end."""
    agreed = agree(mine, theirs, paired.pairing)
    if agreed is not None:
        return agreed
    others = [target for target in theirs.readings if target.range in paired.pools[1]]
    if not others:
        return None
    data = any(_has_data(target, paired.ranges[1]) for target in others)
    candidates = [t for t in mine.readings if t.range in paired.pools[0] and _has_data(t, paired.ranges[0]) == data]
    return candidates[0] if len(candidates) == 1 else None


def _has_data(target: Reading, ranges: tuple[Range, ...]) -> bool:
    """Whether an address may be that of something: it is not one past the end."""
    return target.offset < ranges[target.range].size


def stays(word: Word, ranges: tuple[Range, ...]) -> bool:
    """Whether a word, if it is an address, is one of weights, inputs or state, which the other process has at the same place.  A
    number below stale bytes reads as one, the more often the more weights there are (8B: 16 GB)."""
    return all(ranges[reading.range].kind in KEPT for reading in word.readings)


def pair_ranges(a: Take, b: Take) -> Pairing:
    """Pair the ranges of two takes of the same graphs (`relocate.compare` has passed)."""
    votes: Counter[tuple[int, int]] = Counter()
    for mine, theirs in _words(a, b):
        for x in mine.readings:
            for y in theirs.readings:
                if x.offset == y.offset and alike(a.ranges[x.range], b.ranges[y.range]):
                    votes[x.range, y.range] += 1
    pairing: Pairing = {
        i: i for i, (x, y) in enumerate(zip(a.ranges, b.ranges, strict=False)) if x.kind == y.kind and x.kind in KEPT
    }
    taken = set(pairing.values())
    for (one, other), _count in sorted(votes.items(), key=lambda item: (-item[1], item[0])):
        if one not in pairing and other not in taken:
            pairing[one] = other
            taken.add(other)
    return pairing


def alike(x: Range, y: Range) -> bool:
    """Whether two ranges of two processes can be the same piece of memory."""
    return (x.kind, x.size, x.key) == (y.kind, y.size, y.key)


def agree(mine: Word, theirs: Word, pairing: Pairing) -> Reading | None:
    """The reading of `mine` that `theirs` has too, in terms of the first process; None when they share none."""
    others = {(t.range, t.offset) for t in theirs.readings}
    return next((t for t in mine.readings if (pairing.get(t.range), t.offset) in others), None)


def _words(a: Take, b: Take) -> Iterator[tuple[Word, Word]]:
    for x, y in zip(a.graphs, b.graphs, strict=True):
        yield from _graph_words(x, y)
    for s, t in zip(a.states, b.states, strict=True):
        yield from _match(s.block.words, t.block.words)


def _graph_words(x: RawGraph, y: RawGraph) -> Iterator[tuple[Word, Word]]:
    for m, n in zip(x.nodes, y.nodes, strict=True):
        if isinstance(m, RawKernel) and isinstance(n, RawKernel):
            yield from _match(m.block.words, n.block.words)
        elif isinstance(m, RawMemset) and isinstance(n, RawMemset):
            yield m.target, n.target
        elif isinstance(m, RawMemcpy) and isinstance(n, RawMemcpy):
            yield m.source, n.source
            yield m.target, n.target
        elif isinstance(m, RawSetCondition) and isinstance(n, RawSetCondition):
            yield m.byte, n.byte
    for v, w in zip((*x.inputs, *x.outputs), (*y.inputs, *y.outputs), strict=True):
        yield v.place, w.place


def _match(mine: Iterable[Word], theirs: Iterable[Word]) -> Iterator[tuple[Word, Word]]:
    at = {word.at: word for word in theirs}
    return ((word, at[word.at]) for word in mine if word.at in at)
