"""The arena plan: the offsets of a lowered program's temporaries in memory `arena`.  Pure; sizes in bytes.

Two temporaries may share bytes if one's last use comes before the other's first use.  The largest sum of sizes that are live
together is a lower bound.  Finding the smallest arena is NP-hard (dynamic storage allocation).  Greedy placement of the buffers, in
a few orders, reaches the bound on real programs.  If it does not, the highest buffers are placed first in the next attempt.  Equal
programs get equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType

from ...errors import BuildError
from ...targets.memory_layout import PAD, align
from ..lowered import (
    TEMPORARY,
    Allocate,
    Begin,
    Copy,
    End,
    Event,
    Exchange,
    Fill,
    Launch,
    Lowered,
    NextBody,
    Pointer,
    Release,
    SetCondition,
)

WORK = 3_000_000
"""Planning stops after this many comparisons of two buffers, which take about a second."""

ROUNDS = 200
"""The maximum number of attempts to improve the best order of placement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`offsets`: position in `Lowered.buffers` -> offset in memory `arena` for every temporary, multiples of 256.  `arena`: bytes
    that the program needs, with `PAD` bytes at the end.  `bound`: the offset `start` plus the largest sum of aligned sizes that are
    live together."""

    offsets: Mapping[int, int]
    arena: int
    bound: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetime:
    """A buffer's aligned `size`, and the positions in `Lowered.events` of its first and last use, both included."""

    buffer: int
    size: int
    first: int
    last: int


def plan(lowered: Lowered, kept: Mapping[int, int] = MappingProxyType({}), start: int = 0) -> Plan:
    """Places every temporary; empty and unused ones get offset `start`.  A temporary lives from its first to its last use, an
    output to the end.  `kept`: buffers that already have an offset below `start`, which no other buffer gets.  Raises
    lifetime-broken if a buffer is used before Allocate or after Release."""
    offsets = {i: start for i, buffer in enumerate(lowered.buffers) if buffer.kind == TEMPORARY}
    lives = [life for life in lifetimes(lowered) if life.buffer not in kept]
    bound = largest_sum(lives)
    packed_offsets, height = _pack(lives, bound)
    offsets.update({life.buffer: start + offset for life, offset in zip(lives, packed_offsets, strict=True)})
    return Plan(offsets=offsets | dict(kept), arena=start + height + PAD, bound=start + bound)


def lifetimes(lowered: Lowered) -> tuple[Lifetime, ...]:
    """Returns the lifetimes of all temporaries that are used and not empty, ordered by first use.  Raises lifetime-broken.

    A buffer that is used inside and outside a loop lives through the whole loop, because the next iteration needs it unchanged.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    allocated: set[int] = set()
    released: set[int] = set()
    for moment, event in enumerate(lowered.events):
        if isinstance(event, Allocate):
            if event.buffer in allocated or event.buffer in first:
                why = "a second time" if event.buffer in allocated else "after its first use"
                raise _broken(lowered, moment, event.buffer, f"allocated {why}")
            allocated.add(event.buffer)
        elif isinstance(event, Release):
            released.add(event.buffer)
        else:
            for buffer in uses(event):
                if buffer in released:
                    raise _broken(lowered, moment, buffer, "used after its release")
                first.setdefault(buffer, moment)
                last[buffer] = moment
    for output in lowered.outputs:
        first.setdefault(output.pointer.buffer, len(lowered.events))
        last[output.pointer.buffer] = len(lowered.events)
    for begin, end in loops(lowered):
        for buffer in first:
            if first[buffer] < begin < last[buffer] < end:
                last[buffer] = end
            elif begin < first[buffer] < end < last[buffer]:
                first[buffer] = begin
    lives = [
        Lifetime(buffer=i, size=align(lowered.buffers[i].nbytes), first=first[i], last=last[i])
        for i in first
        if lowered.buffers[i].kind == TEMPORARY and lowered.buffers[i].nbytes
    ]
    return tuple(sorted(lives, key=lambda life: (life.first, life.buffer)))


def loops(lowered: Lowered) -> list[tuple[int, int]]:
    """The positions of the beginning and the end of every loop, inner loops first."""
    begins: dict[int, int] = {}
    spans = []
    for moment, event in enumerate(lowered.events):
        if isinstance(event, Begin) and event.type == "while":
            begins[event.conditional] = moment
        elif isinstance(event, End) and event.conditional in begins:
            spans.append((begins.pop(event.conditional), moment))
    return spans


def uses(event: Event) -> Iterator[int]:
    """The buffers that an event reads or writes, by position."""
    if isinstance(event, Launch):
        yield from (argument.buffer for argument in event.arguments if isinstance(argument, Pointer))
    elif isinstance(event, Copy | Exchange):
        yield from (event.source.buffer, event.target.buffer)
    elif isinstance(event, Fill):
        yield event.target.buffer
    elif isinstance(event, SetCondition):
        yield event.byte.buffer
    elif not isinstance(event, Begin | NextBody | End):
        yield event.buffer


def largest_sum(lives: Iterable[Lifetime]) -> int:
    """The largest sum of sizes that are live at the same time."""
    return max(_sums(sorted(lives, key=lambda life: life.first)), default=0)


def _sums(lives: Sequence[Lifetime]) -> Iterator[int]:
    """Yields the sum of the sizes that are live at the first use of each buffer.  `lives`: ordered by first use."""
    ends: list[tuple[int, int]] = []
    total = 0
    for life in lives:
        while ends and ends[0][0] < life.first:
            total -= heappop(ends)[1]
        heappush(ends, (life.last, life.size))
        total += life.size
        yield total


def _broken(lowered: Lowered, moment: int, buffer: int, what: str) -> BuildError:
    row = lowered.buffers[buffer]
    text = f"int_key {lowered.key}, event {moment}: buffer {buffer} ({row.kind} {row.name}) is {what}"
    return BuildError("lifetime-broken", text)


# --- packing --------------------------------------------------------------------------------------------------

Order = list[int]
"""Positions of lifetimes, in the order of placement."""

Gap = Callable[[Sequence[tuple[int, int]], int], int]
"""Maps (occupied ranges ordered by offset, size) to the offset of a free range of that size."""


def _pack(lives: Sequence[Lifetime], bound: int) -> tuple[list[int], int]:
    """Returns the offsets in the order of `lives`, and the end of the highest buffer."""
    meets = _meetings(lives)
    cost = sum(map(len, meets)) + len(lives)
    attempts = max(WORK // max(cost, 1), 1)
    best: tuple[int, list[int], Order, Gap] | None = None
    for order in _orders(lives):
        for gap in (lowest_gap, tightest_gap):
            if attempts <= 0:
                break
            attempts -= 1
            offsets, height = _place(lives, meets, order, gap)
            if best is None or height < best[0]:
                best = (height, offsets, order, gap)
            if height <= bound:
                return offsets, height
    assert best is not None  # `attempts` was at least 1
    return _improve(lives, meets, bound, best, min(attempts, ROUNDS))


def _improve(
    lives: Sequence[Lifetime], meets: Sequence[Sequence[int]], bound: int, best: tuple[int, list[int], Order, Gap], rounds: int
) -> tuple[list[int], int]:
    """Repeatedly moves the highest buffers to the front of the order.  Returns the smallest plan, like `_pack`."""
    height, offsets, order, gap = best
    current, seen = order, {tuple(order)}
    current_offsets, top = offsets, height
    for _ in range(rounds):
        if height <= bound:
            break
        top_buffers = [i for i in range(len(lives)) if current_offsets[i] + lives[i].size == top]
        current = top_buffers + [i for i in current if current_offsets[i] + lives[i].size != top]
        if tuple(current) in seen:  # this order was tried before, so the buffers below the top ones come first
            lower_buffers = {j for i in top_buffers for j in meets[i] if current_offsets[j] + lives[j].size == current_offsets[i]}
            current = sorted(lower_buffers) + [i for i in current if i not in lower_buffers]
            if tuple(current) in seen:
                break
        seen.add(tuple(current))
        current_offsets, top = _place(lives, meets, current, gap)
        if top < height:
            height, offsets = top, current_offsets
    return offsets, height


def _meetings(lives: Sequence[Lifetime]) -> list[list[int]]:
    """For each lifetime, the positions of the other lifetimes that overlap it.  `lives`: ordered by first use."""
    meets: list[list[int]] = [[] for _ in lives]
    live: list[int] = []
    for i, life in enumerate(lives):
        live = [j for j in live if lives[j].last >= life.first]
        for j in live:
            meets[j].append(i)
        meets[i].extend(live)
        live.append(i)
    return meets


def _orders(lives: Sequence[Lifetime]) -> Iterator[Order]:
    """Yields the orders to try, those that were best on real programs first.  Ties are broken by first use."""
    count = range(len(lives))

    def by(rank: Callable[[Lifetime], tuple[int, ...]]) -> Order:
        return sorted(count, key=lambda i: (*rank(lives[i]), i))

    yield by(lambda x: (-x.size, x.first - x.last))
    yield by(lambda x: (-x.size * (x.last - x.first + 1),))
    yield by(lambda x: (x.first - x.last, -x.size))
    yield by(lambda x: (x.first, -x.size))
    yield by(lambda x: (-x.last, -x.size))
    pressure = _pressure(lives)
    yield sorted(count, key=lambda i: (-pressure[i], -lives[i].size, i))
    yield sorted(count, key=lambda i: (-pressure[i], lives[i].first - lives[i].last, i))


def _pressure(lives: Sequence[Lifetime]) -> list[int]:
    """For each lifetime, the largest sum of live sizes during it.  Compares the sums at first uses, because sums grow only
    there."""
    sums = list(_sums(lives))
    result = []
    for i, life in enumerate(lives):
        most = sums[i]
        for j in range(i + 1, len(lives)):
            if lives[j].first > life.last:
                break
            most = max(most, sums[j])
        result.append(most)
    return result


def _place(lives: Sequence[Lifetime], meets: Sequence[Sequence[int]], order: Order, gap: Gap) -> tuple[list[int], int]:
    """Places the buffers in order.  Each gets a range that no earlier buffer uses during its lifetime."""
    offsets = [-1] * len(lives)
    height = 0
    for i in order:
        occupied = sorted([(offsets[j], offsets[j] + lives[j].size) for j in meets[i] if offsets[j] >= 0])
        offsets[i] = gap(occupied, lives[i].size)
        height = max(height, offsets[i] + lives[i].size)
    return offsets, height


def lowest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Returns the lowest offset at which `size` bytes overlap none of the sorted ranges (begin, end)."""
    free = 0
    for start, end in taken:
        if start - free >= size:
            return free
        free = max(free, end)
    return free


def tightest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Returns the offset of the smallest gap with `size` bytes or more, the lowest of equal ones.  Without a gap, returns the end
    of all ranges."""
    free, best, size_of_best = 0, -1, 0
    for start, end in taken:
        if start - free >= size and (best < 0 or start - free < size_of_best):
            best, size_of_best = free, start - free
        free = max(free, end)
    return best if best >= 0 else free
