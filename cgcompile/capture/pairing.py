"""Pairs each memory range of one recorder process with the same range of the other process.  Pure.

Ranges of KEPT kinds have the same position in both processes.  Segments and allocations come in any order, so they are paired by
the pointers to them.  The same word of the same node may mean (range, offset) in one process and (range', offset) in the other.
This is one vote for the pair, if both ranges have the same kind, size and key.  Bytes that only look like an address may add false
votes, but every real pointer votes for the right pair.  Pairs with the most votes are chosen first, and each range is paired once.
A pointer whose range has no pair is refused later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .take import Range, RawGraph, RawKernel, RawMemcpy, RawMemset, RawSetCondition, Reading, Take, Word

KEPT = ("weights", "inputs", "state")
"""Kinds of ranges that have the same position in every process: the build places everything in them, or they hold an engine's
named tensors.  Each kind is also the name of a memory of the bundle."""

Pairing = dict[int, int]
"""Index of a range in the first process -> index of the same range in the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedRanges:
    """The `ranges` of two takes and their `pairing`.  `hosts`, `pools`: indices of the ranges of kind "host" and "pool"."""

    pairing: Pairing
    ranges: tuple[tuple[Range, ...], tuple[Range, ...]]
    hosts: tuple[frozenset[int], frozenset[int]]
    pools: tuple[frozenset[int], frozenset[int]]


def pair_takes(a: Take, b: Take) -> PairedRanges:
    """Pairs the ranges of two takes of the same graphs."""

    def indices(kind: str) -> tuple[frozenset[int], frozenset[int]]:
        mine, theirs = (frozenset(i for i, memory_range in enumerate(take.ranges) if memory_range.kind == kind) for take in (a, b))
        return mine, theirs

    return PairedRanges(pairing=pair_ranges(a, b), ranges=(a.ranges, b.ranges), hosts=indices("host"), pools=indices("pool"))


def meaning(mine: Word, theirs: Word, paired: PairedRanges) -> Reading | None:
    """Returns the place that a word means, or None if the processes disagree.  The word must be an address in both.  The processes
    may use different blocks of the graph's private pool, because torch's allocator returns the free block with the lowest address.
    Then the first process's block is used, and the replay over poisoned memory verifies it.  An address between two segments means
    the begin of the second, unless the word of the other process can only mean the end of a segment."""
    shared = agree(mine, theirs, paired.pairing)
    if shared is not None:
        return shared
    pool_readings = [target for target in theirs.readings if target.range in paired.pools[1]]
    if not pool_readings:
        return None
    data = any(_has_data(target, paired.ranges[1]) for target in pool_readings)
    candidates = [t for t in mine.readings if t.range in paired.pools[0] and _has_data(t, paired.ranges[0]) == data]
    return candidates[0] if len(candidates) == 1 else None


def _has_data(target: Reading, ranges: tuple[Range, ...]) -> bool:
    """Whether an address lies inside its range, not one past the end."""
    return target.offset < ranges[target.range].size


def stays(word: Word, ranges: tuple[Range, ...]) -> bool:
    """Whether every reading of a word lies in weights, inputs or state, which have the same offsets in both processes.  The more
    weights (8B parameters: 16 GB), the more often a 4-byte number below four stale bytes looks like such an address."""
    return all(ranges[reading.range].kind in KEPT for reading in word.readings)


def pair_ranges(a: Take, b: Take) -> Pairing:
    """Pairs the ranges of two takes of the same graphs.  Call `relocation.compare` before it."""
    votes: Counter[tuple[int, int]] = Counter()
    for mine, theirs in _words(a, b):
        for x in mine.readings:
            for y in theirs.readings:
                if x.offset == y.offset and alike(a.ranges[x.range], b.ranges[y.range]):
                    votes[x.range, y.range] += 1
    pairing: Pairing = {
        i: i for i, (x, y) in enumerate(zip(a.ranges, b.ranges, strict=False)) if x.kind == y.kind and x.kind in KEPT
    }
    paired_others = set(pairing.values())
    for (one, other), _count in sorted(votes.items(), key=lambda item: (-item[1], item[0])):
        if one not in pairing and other not in paired_others:
            pairing[one] = other
            paired_others.add(other)
    return pairing


def alike(x: Range, y: Range) -> bool:
    """Whether a range of one process and one of the other may be the same memory."""
    return (x.kind, x.size, x.key) == (y.kind, y.size, y.key)


def agree(mine: Word, theirs: Word, pairing: Pairing) -> Reading | None:
    """Returns the first reading of `mine` that means the same place as a reading of `theirs`, or None."""
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
