"""Cuts operations of two kinds, with dependencies, into the fewest alternating layers.  Pure Python.

**The minimum.**  Number the layers from 1 and fix the kind of the first layer; the kinds alternate after it.  Give every operation
the smallest number that its kind allows and that is not below the numbers of its dependencies (`_earliest`).  By induction, no
valid numbering gives an operation a smaller number.  So the largest number is the smallest count of layers for this first kind.
Try both first kinds, and take the smaller count.  (If the first layer stays empty, no numbering starts with that kind.)

**The choice between minimal numberings.**  `_settle` goes backwards.  Each operation takes the largest number that is not above
the numbers of its readers, nor above the largest `_earliest` number up to its position in the program.  An operation of kind
"either" takes a graph layer if its range has one.  An operation of kind "host" takes its smallest number, so that host operations
that read the same values are in one layer.  This is greedy: another choice may have fewer operations of kind "either" on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["graph", "host", "either"]
"""Where an operation can run.  "either": a free operation, which costs nothing on either side."""

Side = Literal["graph", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The positions of the operations of one region, in the original order."""

    kind: Side
    operations: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbering:
    """A layer number for every operation.  Layer 1 has the kind `first`."""

    first: Side
    earliest: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def count(self) -> int:
        return max(self.earliest)


def cut(
    kinds: Sequence[Kind], edges: Sequence[tuple[int, int]], small: int = 0, weights: Sequence[int] | None = None
) -> tuple[Layer, ...]:
    """Returns the fewest layers that alternate between graph and host and respect `edges`, pairs (earlier, later) of positions.

    `small`: a graph layer between two host layers moves to the host if it weighs less than this.  The lightest layer moves first,
    and one graph layer always remains.  The first and the last layer stay, because the call's inputs and outputs cross there
    anyway.  Each operation of kind "graph" weighs 1, or its entry of `weights`.  A copy to the host and back takes about 20 us, a
    small kernel 2 to 5 us.  Raises ValueError for an edge that does not point forward.
    """
    before: list[list[int]] = [[] for _ in kinds]
    for earlier, later in edges:
        if not 0 <= earlier < later < len(kinds):
            raise ValueError(f"edge ({earlier}, {later}) does not point forward among {len(kinds)} operations")
        before[later].append(earlier)
    after: list[list[int]] = [[] for _ in kinds]
    for later, sources in enumerate(before):
        for earlier in sources:
            after[earlier].append(later)
    adjusted_kinds = list(kinds)
    if not adjusted_kinds:
        return ()
    while True:
        best = _best(adjusted_kinds, before, after)
        moved = _too_small(best, adjusted_kinds, after, small, weights or [1] * len(kinds))
        if not moved:
            return _layers(best)
        for position in moved:
            adjusted_kinds[position] = "host"


def _best(kinds: Sequence[Kind], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> _Numbering:
    """Returns the better numbering.  Compares, in this order: fewer layers, fewer free operations on the host, nearer to the
    original order, graph first."""
    numberings = []
    sides: tuple[Side, Side] = ("graph", "host")
    for first in sides:
        earliest = _earliest(kinds, before, first)
        if 1 in earliest:
            numbers = _settle(kinds, after, first, earliest)
            numberings.append(_Numbering(first=first, earliest=tuple(earliest), numbers=tuple(numbers)))

    def cost(numbering: _Numbering) -> tuple[int, int, int]:
        free = sum(
            kind == "either" and _side(number, numbering.first) == "host"
            for kind, number in zip(kinds, numbering.numbers, strict=True)
        )
        order = sorted(range(len(kinds)), key=lambda position: (numbering.numbers[position], position))
        return numbering.count, free, sum(abs(place - position) for place, position in enumerate(order))

    return min(numberings, key=cost)


def _side(number: int, first: Side) -> Side:
    other: Side = "host" if first == "graph" else "graph"
    return first if number % 2 else other


def _fits(kind: Kind, number: int, first: Side) -> bool:
    return kind in ("either", _side(number, first))


def _earliest(kinds: Sequence[Kind], before: Sequence[Sequence[int]], first: Side) -> list[int]:
    numbers: list[int] = []
    for kind, sources in zip(kinds, before, strict=True):
        lowest = max([numbers[source] for source in sources], default=1)
        numbers.append(lowest if _fits(kind, lowest, first) else lowest + 1)
    return numbers


def _latest(kinds: Sequence[Kind], after: Sequence[Sequence[int]], first: Side, count: int) -> list[int]:
    numbers = [count] * len(kinds)
    for position in reversed(range(len(kinds))):
        highest = min([numbers[reader] for reader in after[position]], default=count)
        numbers[position] = highest if _fits(kinds[position], highest, first) else highest - 1
    return numbers


def _settle(kinds: Sequence[Kind], after: Sequence[Sequence[int]], first: Side, earliest: Sequence[int]) -> list[int]:
    """Chooses each operation's number between its earliest number and the smallest number of its readers."""
    reached, running = [], 1
    for number in earliest:
        running = max(running, number)
        reached.append(running)
    numbers = list(earliest)
    for position in reversed(range(len(kinds))):
        low, high = earliest[position], min([numbers[reader] for reader in after[position]], default=max(earliest))
        fitting = [number for number in range(low, high + 1) if _fits(kinds[position], number, first)]
        in_graphs = [number for number in fitting if _side(number, first) == "graph"]
        if kinds[position] == "either" and in_graphs:
            fitting = in_graphs
        unmoved = [number for number in fitting if number <= reached[position] and kinds[position] != "host"]
        numbers[position] = unmoved[-1] if unmoved else fitting[0]
    return numbers


def _too_small(
    best: _Numbering, kinds: Sequence[Kind], after: Sequence[Sequence[int]], small: int, weights: Sequence[int]
) -> tuple[int, ...]:
    """Returns the operations that fit only in the lightest graph layer between two host layers, if they weigh less than `small`."""
    latest = _latest(kinds, after, best.first, best.count)
    graphs = [number for number in range(1, best.count + 1) if _side(number, best.first) == "graph"]
    inner = [number for number in graphs if 1 < number < best.count]
    fixed = {
        number: tuple([p for p in range(len(kinds)) if kinds[p] == "graph" and best.earliest[p] == latest[p] == number])
        for number in inner
    }
    light = {number: sum(weights[position] for position in fixed[number]) for number in inner}
    if len(graphs) < 2 or not inner:
        return ()
    lightest = min(inner, key=lambda number: (light[number], number))
    return fixed[lightest] if light[lightest] < small else ()


def _layers(best: _Numbering) -> tuple[Layer, ...]:
    positions: list[list[int]] = [[] for _ in range(best.count)]
    for position, number in enumerate(best.numbers):
        positions[number - 1].append(position)
    return tuple([Layer(kind=_side(number, best.first), operations=tuple(layer)) for number, layer in enumerate(positions, 1)])
